"""Ahead-of-time compiles for devices that are not there: ``make aot``, or ``python -m tests.aot``.

libtpu and XLA's CUDA plugin compile for a described device. What they say of the programs (bytes of
temporaries, collectives, copies of a cache) is kept in ``table.json``; a program that gets worse,
or does not compile any more, fails the run.
"""
