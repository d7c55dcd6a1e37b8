"""Programs of an engine, compiled before sequences need them."""

import contextlib
import threading
from collections.abc import Sequence

import jax
import platformdirs
from jax.sharding import Mesh

from jspec.core.logprobs import Scoring
from jspec.engine.compilation import Compilation, OnProgress, without_followers
from jspec.engine.engine import Engine
from jspec.engine.profile import Profile
from jspec.engine.sequences import SequenceParams


class Programs:
    """Compiles the programs that an engine lacks for a sequence.

    From then on the engine has no reason to compile while others run: see ``Profiles``.

    Args:
      engine: which runs on the devices of ``mesh``.
      mesh: the devices of the weights; None for one.
    """

    def __init__(self, engine: Engine, mesh: Mesh | None = None):
        self._engine, self._worker = engine, engine.runner.worker
        self._compilation = Compilation(
            self._worker, num_slots=engine.num_slots, capacity=engine.capacity, mesh=mesh
        )
        self._profiles = engine.runner.request.profiles
        self._profiles.are_compiled_ahead = True
        self._lock = threading.Lock()

    def may_lack(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> bool:
        """Return whether ``compile`` would find anything; this is quick.

        Functions of users are compiled only while they run, and are left to the engine.
        """
        if sequences[0].logits_processors:
            return False
        is_missing = self._compilation.may_lack(scoring)
        return is_missing or not self._profiles.suit(self._needed(sequences, scoring))

    def may_run(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> bool:
        """Return whether sequences may join those of the engine, and nothing will compile."""
        if sequences[0].logits_processors:
            return True
        return self._profiles.cover(self._needed(sequences, scoring))

    def compile(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> None:
        """Compile what runs ``sequences`` with those of the engine; several threads may call.

        Args:
          sequences: whose settings the profile will have; prompts do not count.
          scoring: scores of tokens; None for none.
        """
        with self._lock:  # whoever finds nothing missing may go on
            if self.may_lack(sequences, scoring):
                needed = self._needed(sequences, scoring)
                # What is wide has one program, for greedy sequences too.
                profile = needed.numeric() if needed.wide else needed
                self._compile([profile], scoring)

    def compile_basic(self, on_progress: OnProgress = lambda *_: None) -> None:
        """Compile what runs sequences of all numeric settings, and prompts of all lengths.

        ``on_progress`` is called with the number of programs that are done, and of all.
        """
        greedy = self._profiles.needed(())
        with self._lock:
            self._compile([greedy, greedy.numeric()], None, on_progress)

    def _needed(self, sequences: Sequence[SequenceParams], scoring: Scoring | None) -> Profile:
        """Return the profile for the sequences and all of the engine."""
        running = self._engine.scheduler.sequences
        every = [*sequences, *(each.params for each in running)]
        return self._profiles.needed(every, [scoring, *(each.scoring for each in running)])

    def _compile(
        self,
        profiles: Sequence[Profile],
        scoring: Scoring | None,
        on_progress: OnProgress = lambda *_: None,
    ) -> None:
        """Compile what is missing of the programs of profiles, in all processes."""
        channel, compilation = self._worker.channel, self._compilation
        others = contextlib.nullcontext()
        if channel is not None:
            others = channel.beside(compilation, "compile", profiles, scoring)
        with others:
            compilation.compile(profiles, scoring, on_progress)
        for profile in (*map(without_followers, profiles), *profiles):
            self._profiles.add(profile)


def keep_compiled_programs() -> None:
    """Turn on JAX's persistent compilation cache, unless the user has configured it."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        directory = platformdirs.user_cache_path("jspec") / "xla"
        jax.config.update("jax_compilation_cache_dir", str(directory))
        # Small programs too: the first call runs dozens, which add up to seconds.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
