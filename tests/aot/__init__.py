"""Ahead-of-time compilation for absent devices: ``make aot``, or ``python -m tests.aot``.

libtpu and XLA's CUDA plugin compile for a described device. ``table.json`` stores the figures of
the programs: bytes of temporaries, collectives, copies of a cache. A program that gets worse, or
fails to compile, fails the run. ``tests.aot.roofline`` counts the bytes of large models' rounds, by
``roofline.json``. ``tests.aot.startup`` compiles what a server does before it answers.
"""
