"""The teacher: a model that the policy is to become like, asked about the policy's own tokens.

It is another model (teacher.path), one of several that a row names (teacher.paths), or the policy
itself with more to read than the policy has (teacher.path = "policy" and teacher.prompt).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from groupwise.config import Config
from groupwise.errors import ConfigError, DataError
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method
from groupwise.model.cost import RoleSize
from groupwise.model.formats.checkpoint import stored_shape, stored_tokenizer
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.equip import equip
from groupwise.model.layers.head import Opposite
from groupwise.model.layers.transformer import Policy
from groupwise.model.policy import load_policy
from groupwise.optim.packs import Pack, Sequences, outputs
from groupwise.optim.roles.other_model import check_length, other_tokens
from groupwise.optim.roles.reference import Reference
from groupwise.optim.roles.role import Role, Score
from groupwise.parallel.sharding import gathered
from groupwise.parallel.world import World
from groupwise.records import Task, TokenBatch

POLICY = "policy"  # teacher.path and teacher.update
ONE = ""  # the name of a teacher that is the only one
COLUMN = "teacher"  # of the data, where there are several
ROWS = 1000  # that both tokenizers must read alike
REMEDY = (
    "Take a teacher of the policy's family, or learn from its answers instead of its "
    "probabilities, which any tokenizer can: `groupwise collect TEACHER --data DATA --out DIR`, "
    'then recipe=sft recipe.source=run data.runs=["DIR"].'
)


class Teacher(Role):
    """One or several frozen models, or the policy as it was or is; nothing of it is trained."""

    name = "teacher"
    settings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "teacher.path",
            "teacher.paths",
            "teacher.update",
            "teacher.dtype",
            "teacher.prompt",
            "teacher.template",
        ),
        "it has no teacher: take distill or gkd, or add minus_teacher_kl() to recipe.advantage",
    )

    def __init__(
        self,
        models: Mapping[str, Policy],
        recipe: Method,
        temperature: float,
        moving: Reference | None = None,
    ) -> None:
        self.models, self._moving = models, moving
        self._temperature = temperature
        self._wanted = [name for name in recipe.streams if name.startswith("teacher_")]
        settings = [slot for slot in recipe.of("penalty") if "beta" in slot]
        self._k = max((slot["k"] for slot in settings if "k" in slot), default=0)
        known = min(model.config.vocab_size for model in models.values())
        if self._k > known:
            raise ConfigError(
                f"recipe.penalty.k={self._k} is more than the {known} tokens that the teacher "
                f"knows. Set recipe.penalty.k={known} or less."
            )
        whole = "teacher_divergence_NT" in recipe.outputs
        self._beta = next((s["beta"] for s in settings if whole and "k" not in s), None)
        self._rows, self._own = list[str](), Sequences((), ())  # of the step that is learned from
        self._in_step = False  # with other ranks

    @classmethod
    def made(cls, model: Policy, recipe: Method, config: Config) -> Teacher:
        asked = config.teacher
        temperature = config.engine.temperature if recipe.samples else 1.0
        if asked.path == POLICY:
            if asked.update == POLICY:
                return cls({ONE: model}, recipe, temperature)
            moving = Reference(model, asked.update)
            return cls({ONE: moving.model}, recipe, temperature, moving)
        like = model.head_weight
        dtype = like.dtype if asked.dtype == "auto" else getattr(torch, asked.dtype)
        models = {}
        for name, path in paths_of(config).items():
            models[name] = load_policy(path, dtype, like.device).model.requires_grad_(False)
            equip(models[name], exact=False)
        return cls(models, recipe, temperature)

    # --- before a run ---

    @classmethod
    def refused(cls, config: Config) -> list[str]:
        asked, paths = config.teacher, paths_of(config)
        if asked.path and asked.paths:
            return ["teacher.path and teacher.paths are both set. Keep one of the two."]
        if not paths:
            return [
                f"recipe {config.recipe.name} learns from a teacher, and none is named. Set "
                'teacher.path to a model with the policy\'s tokenizer, or to "policy" for the '
                "policy itself with teacher.prompt."
            ]
        found = [
            f"teacher.paths.{n} is empty. Name a model." for n, path in paths.items() if not path
        ]
        if asked.path != POLICY:
            if asked.update != "frozen":
                found.append(
                    f"teacher.update={asked.update} is for teacher.path=policy: another model "
                    "stays as it is. Leave it out."
                )
        elif not asked.prompt and not asked.template and asked.update in ("frozen", POLICY):
            found.append(
                "teacher.path=policy: the policy would learn from itself, reading what it reads "
                "anyway. Give it more to read with teacher.prompt, for example "
                "teacher.prompt='{prompt}\\n\\nA solution: {solution}'."
            )
        if asked.path == POLICY and asked.dtype != "auto":
            found.append("teacher.dtype is for another model than the policy. Leave it out.")
        return found or _other_tokenizers(config)

    @classmethod
    def check_tasks(cls, config: Config, tasks: Sequence[Task]) -> None:
        known = config.teacher.paths
        for task in tasks if known else ():
            if task.columns.get(COLUMN) not in known:
                raise DataError(
                    f"Row {task.id} has {task.columns.get(COLUMN)!r} in column {COLUMN!r}, which "
                    f"names none of teacher.paths ({', '.join(known)}). Add it there, or mend the "
                    "row."
                )

    @classmethod
    def reads_otherwise(cls, config: Config) -> bool:
        return bool(config.teacher.prompt or config.teacher.template)

    @classmethod
    def check_tokens(cls, config: Config, tasks: Sequence[Task], tokenizer: Tokenizer) -> None:
        wrong = _other_tokenizers(config, tokenizer)
        if wrong:
            raise ConfigError(wrong[0])
        for path in _others(config):
            check_length(config, "teacher", path, tasks)
            other = stored_tokenizer(path)
            for task in islice(tasks, ROWS):
                text = tokenizer.decode(task.token_ids)
                mine, theirs = tokenizer.encode(text), other.encode(text)
                if mine != theirs:
                    raise ConfigError(
                        f"teacher {path} reads row {task.id} as other tokens than "
                        f"{config.model.path}: {theirs[:8]}... instead of {mine[:8]}.... {REMEDY}"
                    )

    @classmethod
    def size(cls, config: Config, width: int) -> RoleSize:
        asked, recipe = config.teacher, config.recipe
        passes = int(any(name.startswith("teacher_") for name in recipe.streams))
        passes += "teacher_divergence_NT" in recipe.outputs  # in the update, without a backward one
        if asked.path == POLICY:
            if asked.update == POLICY:
                return RoleSize(cls.name, passes=passes)
            like = replace(config.reference, update=asked.update)
            return replace(
                Reference.size(replace(config, reference=like), width),
                name=cls.name,
                passes=passes,
                instead={"teacher.update=policy": RoleSize(cls.name, passes=passes)},
            )
        shapes = [stored_shape(path) for path in _others(config)]
        known = tuple(shape for shape in shapes if shape is not None)
        # One that is not named, or can't be read before it is loaded, counts as a second policy.
        return RoleSize(cls.name, held=0 if known else width, passes=passes, models=known)

    @classmethod
    def notes(cls, config: Config) -> list[str]:
        lines = [cls.description(config)]
        if config.teacher.prompt:
            lines.append(f"the teacher reads {config.teacher.prompt!r} in place of the prompt")
        return lines

    @classmethod
    def description(cls, config: Config) -> str:
        asked = config.teacher
        if asked.path == POLICY:
            return f"teacher (the policy, {asked.update})"
        if asked.paths:
            return f"teachers by column ({', '.join(f'{n}: {p}' for n, p in asked.paths.items())})"
        return f"teacher ({asked.path})"

    # --- in a step ---

    def spread(self, world: World) -> None:
        if self._moving is not None:
            self._moving.spread(world)
        self.models = {name: world.shard(model) for name, model in self.models.items()}
        self._in_step = world.size > 1

    def streams(self, score: Score) -> dict[str, Tensor]:
        self._remember(score.sequences)
        return score.streams(self._read) if self._wanted else {}

    def _remember(self, sequences: Sequences) -> None:
        """Note who teaches each row, and the rows as teachers read them: other prompts, perhaps."""
        tasks = sequences.tasks
        several = ONE not in self.models
        self._rows = [
            str(tasks[row].columns[COLUMN]) if several else ONE
            for row in range(len(sequences.completions))
        ]
        self._own = sequences
        if any(task.teacher_ids for task in tasks):
            prompts = [task.teacher_ids or task.token_ids for task in tasks]
            self._own = replace(sequences, prompts=prompts)

    def _packs(self, packed: Pack) -> Iterator[tuple[Policy, Pack, list[int]]]:
        """Yield each teacher with its rows of a pass, and their numbers within that.

        Ranks that share models ask every one in every pass: where none of the rows is its own it
        reads the first one, and what it says goes nowhere.
        """
        for name, model in self.models.items():
            at = [i for i, row in enumerate(packed.rows) if self._rows[row] == name]
            if at or self._in_step:
                rows = [packed.rows[i] for i in at] or packed.rows[:1]
                yield model, self._own.pack(rows, packed.row_N.device), at

    def _read(self, packed: Pack) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for model, part, at in self._packs(packed):
            said = outputs(model, part, temperature=self._temperature, top_k=self._k)
            for name, x in said.items():
                if f"teacher_{name}" in self._wanted:
                    whole = x.new_zeros(len(packed.rows), *x.shape[1:])
                    whole = found.setdefault(f"teacher_{name}", whole)
                    whole[at] = x[: len(at)]
        return found

    @torch.no_grad()
    def opposites(self, packed: Pack) -> list[Opposite]:
        if self._beta is None:
            return []
        found = []
        row_A = packed.place_A // packed.width
        for model, part, at in self._packs(packed):
            attend = model.ops.attention(part.prompts, part.behind, part.token_T.device)
            hidden_TD: Tensor = model(part.token_T, part.position_T, attend)
            at_B = torch.isin(row_A, torch.tensor(at, device=row_A.device)).nonzero()[:, 0]
            found.append(
                Opposite(
                    at_B=at_B,
                    hidden_BD=hidden_TD.index_select(0, part.take_A)[: len(at_B)],
                    weight_VD=gathered(model.head_weight.detach()),
                    rule=model.head_rule,
                    beta=self._beta,
                )
            )
        return found

    def measures(self, recipe: Recipe, batch: TokenBatch) -> dict[str, float]:
        teacher_NT, sampler_NT = batch.find("teacher_logp_NT"), batch.sampler_logp_NT
        if teacher_NT is None:
            return {}
        learned = batch.world.gather(batch.learned_NT.sum(1)).sum()
        found = {"teacher/logp": teacher_NT}
        if sampler_NT is not None:
            found["teacher/kl"] = sampler_NT - teacher_NT
        return {
            name: float(batch.world.gather(batch.learned(x_NT).double().sum(1)).sum() / learned)
            for name, x_NT in found.items()
            if learned
        }

    def columns(self, recipe: Recipe, batch: TokenBatch) -> dict[str, Tensor]:
        teacher_NT = batch.find("teacher_logp_NT")
        return {} if teacher_NT is None else {"teacher_logp": teacher_NT}

    # --- a teacher that follows the policy ---

    def after_step(self, policy: Policy, step: int) -> None:
        if self._moving is not None:
            self._moving.after_step(policy, step)

    def state(self) -> dict[str, Tensor]:
        return {} if self._moving is None else self._moving.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if self._moving is not None:
            self._moving.restore(state)


def paths_of(config: Config) -> dict[str, str]:
    """Return the teachers by name."""
    asked = config.teacher
    return dict(asked.paths) or ({ONE: asked.path} if asked.path else {})


def _others(config: Config) -> list[str]:
    """Return the teachers that are other models than the policy."""
    return [path for path in paths_of(config).values() if path != POLICY]


def _other_tokenizers(config: Config, own: Tokenizer | None = None) -> list[str]:
    """Say which teachers read other tokens than the policy writes."""
    found = []
    for path in _others(config):
        other = other_tokens(config, path, own)
        if other:
            found.append(
                f"teacher {path} has another tokenizer than {config.model.path}: {other}. Its "
                f"probabilities are of other tokens. {REMEDY}"
            )
    return found
