"""Work for the ranks of a team: one update of any recipe, by learners of every kind."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from model_zoo import MIXTURES, SIZES
from torch import Tensor

from groupwise import Recipe, TokenBatch, batch_phase, config, recipe
from groupwise.config import load
from groupwise.losses.scores import bradley_terry
from groupwise.methods.composition import PairRecipe, UnpairedRecipe
from groupwise.model.adapters.lora import attach
from groupwise.model.adapters.quantized import quantize
from groupwise.model.adapters.targets import Spec
from groupwise.model.config import ModelConfig
from groupwise.model.layers.transformer import Transformer
from groupwise.model.scalar_head import ScalarHead
from groupwise.optim.learner import Learner, PolicyLearner
from groupwise.optim.packs import Sequences, outputs
from groupwise.optim.pairs import PairLearner
from groupwise.optim.roles import ROLES
from groupwise.optim.roles.critic import Critic
from groupwise.optim.roles.length_exponent import LengthExponent
from groupwise.optim.roles.reference import Reference
from groupwise.optim.roles.role import Role
from groupwise.optim.roles.teacher import Teacher
from groupwise.optim.schedules import LearningRates
from groupwise.optim.scoring import PairComparisons, RowsAsked, ScoreLearner
from groupwise.optim.unpaired import AnswersWithLabels, UnpairedLearner
from groupwise.parallel.sharding import gathered
from groupwise.parallel.world import World
from groupwise.records import Memory
from groupwise.testing.toy import random_toy

# With these the optimizer's first moment is half of the gradient and a quarter of the one before
# it, where a recipe makes two updates, and no weight changes. A pack takes a prompt and two answers
# or so: passes are of many sizes, and no multiple of the ranks.
OPTIM = config.Optim(learning_rate=0.0, beta1=0.5, clip_norm=0.0, micro_tokens=12)
SMALL = SIZES | {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
SHAPE = SMALL | {"model_type": "qwen3", "head_dim": 8, "num_attention_heads": 2}
# Dense in its last layer, and with five experts, which no two or three ranks hold equally many of.
MIXTURE = MIXTURES["qwen3_moe"] | SHAPE | {"model_type": "qwen3_moe", "num_experts": 5}
MIXTURE |= {"num_experts_per_tok": 2, "mlp_only_layers": [1]}
Found = dict[str, Any]


@functools.cache
def model(seed: int = 0, tied: bool = False, experts: bool = False) -> Transformer:
    """A policy in float64 whose every parameter matters. Made once: a team shards it once."""
    shape = MIXTURE if experts else SHAPE | {"num_key_value_heads": 1}
    made = Transformer(ModelConfig.from_hf(shape | {"tie_word_embeddings": tied})).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in sorted(made.named_parameters()):
            around = 1.0 if key.endswith("norm.weight") else 0.0
            parameter.normal_(around, 0.3, generator=generator)
    return made


def gradient(
    world: World, name: str, groups: Sequence[int] = (4, 5, 3), tied: bool = False
) -> Found:
    """The gradients of one update of a recipe, roles included, and what was measured."""
    made = _with_one_update(name)
    if isinstance(made, Recipe):
        return _policy(world, made, groups, model(tied=tied))
    if isinstance(made, PairRecipe):
        return _pairs(world, made)
    if isinstance(made, UnpairedRecipe):
        return _labels(world, made)
    return _scores(world)


def gradients(world: World, names: Sequence[str]) -> dict[str, Found]:
    """The same for many."""
    return {name: gradient(world, name) for name in names}


def _with_one_update(name: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of the recipe, which is what it is
        made = recipe(name)
        return recipe(name, {"schedule.updates": 1}) if isinstance(made, Recipe) else made


def mixture(world: World, name: str) -> Found:
    """The same of a mixture of experts, some of whose routes the sampler recorded."""
    made = _with_one_update(name)
    return _policy(world, made, (4, 5, 3), model(experts=True))


def beside_bits(world: World, kind: Any) -> Found:
    """The same of an adapter beside a quantised base; and which parameters are shards."""
    dtype = torch.float32 if kind == "nf4" else torch.float64  # bitsandbytes has no float64
    made = Transformer(model().config).to(dtype)
    made.load_state_dict(model().state_dict())
    quantize(made, kind, "cpu")
    attach(made, Spec(2, 4.0), seed=0)
    g = torch.Generator().manual_seed(6)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.3, generator=g)
    found = _policy(world, _with_one_update("grpo"), (4, 5, 3), made)
    own = world.shard(made)
    theirs = dict(made.named_parameters())
    found["shared"] = {name for name, p in own.named_parameters() if p is theirs[name]}
    return found


def _policy(world: World, made: Recipe, groups: Sequence[int], whole: Transformer) -> Found:
    toy = random_toy(1, groups=groups)
    length_N = toy.streams["mask_NT"].sum(1).tolist()
    prompts = [p for number, n in enumerate(groups) for p in [(40 + number, 41, 42)] * n]
    ids = toy.streams["token_NT"].tolist()
    answers = [tuple(x[:n]) for x, n in zip(ids, length_N, strict=True)]
    routes = [] if whole.config.experts is None else _routes(prompts, answers)
    sequences = Sequences(prompts, answers, routes=routes)
    rows = list(range(len(prompts)))
    with torch.no_grad():
        base_NT = outputs(whole, sequences.pack(rows), temperature=1.0)["logp_NT"]
    generator = torch.Generator().manual_seed(7)
    width = base_NT.shape[1]
    streams = {k: x[:, :width] if "_NT" in k else x for k, x in toy.streams.items()}
    for stream in ("old_logp_NT", "sampler_logp_NT", "ref_logp_NT", "prm_logp_NT"):
        noise_NT = torch.randn(base_NT.shape, generator=generator, dtype=torch.float64)
        streams[stream] = torch.where(streams["mask_NT"], base_NT + 0.2 * noise_NT, 0.0)
    roles = _roles(whole, made)
    learner = PolicyLearner(whole, made, OPTIM, 1.0, roles, world)
    if "length_exponent" in roles:
        streams |= roles["length_exponent"].moved()
    parts = learner.parts(streams["group_N"].tolist())
    routed = None
    if whole.config.experts is not None:
        before, routed = learner.look_back(made, sequences, parts)
        streams |= before
    batch = batch_phase(made, TokenBatch.build(**streams, world=world.for_rows(len(rows)))).batch
    said = learner.role_streams(sequences, parts)  # teachers note whose rows they are
    rates = LearningRates(0.0, dict.fromkeys(roles, 0.0))
    learned = [
        *learner.learn_first(batch, sequences, parts, rates),
        learner.learn(batch, sequences, parts, rates, routed),
    ]
    found = _of(learner)
    trace = learned[-1].trace  # type: ignore[union-attr]
    found["trace"] = dict(vars(trace))
    found["metrics"] = {k: v for each in learned for k, v in each.metrics().items()}
    found["said"] = said
    return found


def _routes(prompts: Sequence[Any], answers: Sequence[Any]) -> list[Tensor | None]:
    """Routes by chance, and not the model's; every fourth row has none."""
    g = torch.Generator().manual_seed(11)
    found: list[Tensor | None] = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = len(prompt) + len(answer) - 1
        routes_TLK = torch.rand(tokens, 2, 5, generator=g).topk(2).indices.to(torch.int16)
        routes_TLK[:, 1] = -1
        found.append(None if row % 4 == 3 else routes_TLK)
    return found


def _roles(whole: Transformer, made: Recipe) -> dict[str, Role]:
    settings = load({"recipe": made.name, "optim.beta1": 0.5, "critic.learning_rate": 1e-9})
    found: dict[str, Role] = {}
    for name in made.roles:
        if name == "teacher":
            found[name] = Teacher({"": model(seed=5)}, made, 1.0)
        else:
            found[name] = ROLES[name].made(whole, made, settings)
    if "critic" in found:
        cast(Critic, found["critic"]).model.double()  # its score, too
    if "length_exponent" in found:
        found["length_exponent"] = LengthExponent(torch.tensor(0.1).double(), OPTIM)
    return found


def _pairs(world: World, made: PairRecipe) -> Found:
    generator = torch.Generator().manual_seed(2)

    def ids(low: int, high: int) -> tuple[int, ...]:
        count = int(torch.randint(low, high, (), generator=generator))
        return tuple(torch.randint(97, (count,), generator=generator).tolist())

    prompts = [p for _ in range(5) for p in [ids(2, 5)] * 2]
    rows = Sequences(prompts, [ids(1, 8) for _ in prompts])
    reference = model(seed=3) if made.refers else None
    ref_NT = None
    if reference is not None:
        with torch.no_grad():
            ref_NT = outputs(reference, rows.pack(list(range(10))), temperature=1.0)["logp_NT"]
    learner = PairLearner(model(), made, OPTIM, 1.0, {}, world)
    _, metrics, _ = learner.learn_pairs(rows, ref_NT, LearningRates(0.0, {}), Memory())
    return _of(learner) | {"metrics": metrics}


def _labels(world: World, made: UnpairedRecipe) -> Found:
    prompts = [(1, 2), (3, 4), (3, 4), (5,), (6, 7, 8)]
    answers = [(9, 10, 11), (12,), (13, 14), (15, 16, 17, 18), (19, 20)]
    given = AnswersWithLabels.of(prompts, answers, [True, False, True, True, False], 64)
    roles = {"reference": Reference(model(seed=3), "frozen")}
    learner = UnpairedLearner(model(), made, OPTIM, 1.0, roles, world)
    _, metrics = learner.learn_labels(given, LearningRates(0.0, {"reference": 0.0}))
    return _of(learner) | {"metrics": metrics}


@functools.cache
def _head() -> ScalarHead:
    made = ScalarHead(model()).double()
    torch.nn.init.normal_(made.score.weight, generator=torch.Generator().manual_seed(4))
    return made


def _scores(world: World) -> Found:
    prompts = [(1, 2)] * 2 + [(3, 4, 5)] * 3
    answers = [(9, 10, 11), (12,), (13, 14), (15, 16, 17, 18), (19, 20)]
    ends = [(len(ids) - 1,) for ids in answers]
    asked = RowsAsked.of(prompts, answers, ends, [[0, 1], [2, 3, 4]])
    better, worse = [0, 2, 2, 3], [1, 3, 4, 4]
    loss = PairComparisons(
        bradley_terry(centre=0.05), better, worse, [0.0, 0.5, 0.5, 0.5], [1 / 2] + [1 / 6] * 3
    )
    learner = ScoreLearner(_head(), OPTIM, world)
    _, scores_A, total = learner.learn(asked, loss, 0.0)
    assert torch.equal(scores_A, learner.ask(asked))
    return _of(learner) | {"metrics": {"loss": total}, "trace": {"scores": scores_A}}


def _of(learner: Learner) -> Found:
    """Gradients as the optimizers saw them, whole; weights must be what they were."""
    states = {"policy": learner.state()}
    states |= {name: role.state() for name, role in learner.roles.items()}
    found: dict[str, Tensor] = {
        f"{name}/{key}": gathered(x)
        for name, state in states.items()
        for key, x in state.items()
        if "exp_avg/" in key
    }
    assert learner.undelivered() is None
    return {"gradients": found}
