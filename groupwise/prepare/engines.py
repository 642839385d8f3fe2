"""The engine that a configuration names, made: for all who sample, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from groupwise.config import Config
from groupwise.engine.backends import EngineSetup, Tell, backend, capabilities_of, warn
from groupwise.engine.protocol import Engine
from groupwise.errors import EngineError
from groupwise.model.formats.checkpoint import Loaded
from groupwise.sync.publish import Publisher

MakeEngine = Callable[[Loaded], Engine]  # a sampler for this policy, in place of the named one


def engine_of(
    config: Config, loaded: Loaded, make: MakeEngine | None = None, tell: Tell = warn
) -> Engine:
    """Return the sampler of this policy; `tell` hears what people should know of it later."""
    if make is None:
        weights = Publisher(loaded)
        setup = EngineSetup(loaded, config.engine, config.seed, tell, config.train.sync, weights)
        return backend(config.engine.backend).made(setup)
    made = make(loaded)
    if not isinstance(made, Engine):
        raise EngineError(
            f"The argument `engine` made {made!r}, which is no engine. Return a subclass of "
            "groupwise.BatchEngine, which has one method to write, or of groupwise.Engine."
        )
    if made.capabilities.shares_weights != capabilities_of(config.engine).shares_weights:
        raise EngineError(
            f"The engine {type(made).__name__} samples from weights "
            f"{made.capabilities.weights!r}, and by the configuration (engine.backend="
            f"{config.engine.backend!r}, engine.weights={config.engine.weights!r}) others are "
            "sampled from: the update would not correct for what differs. Name the engine in the "
            'configuration instead, engine.backend="file.py:Class".'
        )
    return made


def judge_of(config: Config, loaded: Loaded, make: MakeEngine | None = None) -> Engine:
    """Return the sampler of evaluation and probe: that of training, without a copy on purpose."""
    engine = replace(config.engine, weights="shared", servers=0)
    own = replace(config, engine=engine, train=replace(config.train, lag=0, sync="drain"))
    return engine_of(own, loaded, make)
