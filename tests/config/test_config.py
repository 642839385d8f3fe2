"""The configuration: what is read is what was written, and what makes no sense is refused early."""

from __future__ import annotations

import tomllib
import types
import typing
import warnings
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from groupwise import load_config, recipe
from groupwise.config import Config, difference, load, text
from groupwise.config.changes import RESUME
from groupwise.config.fields import Forms
from groupwise.config.names import ELSEWHERE
from groupwise.config.page import settings_page
from groupwise.config.reading import DEFAULTS
from groupwise.config.values import FIELDS, flat
from groupwise.errors import ConfigError, GroupwiseError, RecipeError, RecipeWarning
from groupwise.losses.gates import clip
from groupwise.methods.composition import RECIPE_SLOTS, PairRecipe, Recipe
from groupwise.methods.slots import REGISTRY, Range, advantage
from groupwise.optim.row_streams import FLAWED
from groupwise.optim.turn_streams import OF_EPISODES
from groupwise.recipes import RECIPES
from groupwise.records import TokenBatch
from groupwise.stages.checks import check_config
from groupwise.stages.describe import describe
from groupwise.stages.group_checks import needs_a_group

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = {"model.device": "cpu", "model.dtype": "float32"}
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
CONFIGS = [
    path for path in CONFIGS if "[[stage]]" not in path.read_text("utf-8")
]  # tests/pipeline has those


def again(config: Config) -> Config:
    """Through the text and back."""
    return load(tomllib.loads(text(config)))


def file(folder: Path, content: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, "utf-8")
    return path


# --- there and back ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_comes_back_from_its_text(name: str) -> None:
    config = load(recipe=name)
    assert config.recipe is recipe(name)
    assert again(config) == config
    written = tomllib.loads(text(config))["recipe"]
    assert written == {"name": name, **config.recipe.text()}


def of_hint(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may hold."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(of_hint, args))
    if is_dataclass(hint):
        inside = typing.get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{name: of_hint(each) for name, each in inside.items()})
    kind, bounds = args if origin is typing.Annotated else (hint, Range())
    if isinstance(bounds, Forms):
        numbered = [x.replace("K", "2").replace("X", "0.5") for x in bounds.patterns]
        return st.sampled_from([*bounds.words, *numbered])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if kind is int:
        return st.integers(int(bounds.low), 10**20)
    if kind is float:
        low, high = max(bounds.low, -1e300), min(bounds.high, 1e300)
        return st.floats(low, high, exclude_min=bounds.above)
    if kind is bool:
        return st.booleans()
    letters = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    if kind is str:
        return letters
    if origin is tuple:
        return st.lists(of_hint(args[0]), max_size=3)
    plain = st.booleans() | st.integers() | st.floats(-1e9, 1e9) | letters
    nested = st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(letters, inner, max_size=2),
        max_leaves=4,
    )
    inner = nested if args[1] is Any else of_hint(args[1])
    return st.dictionaries(letters, inner, max_size=3)


EVERY_FIELD = st.fixed_dictionaries({name: of_hint(hint) for name, hint in FIELDS.items()})


@given(EVERY_FIELD)
@settings(max_examples=60, deadline=None)
def test_every_value_comes_back_from_its_text(values: dict[str, Any]) -> None:
    values["overlong"] = "recipe"  # the others change the recipe: tested below
    config = load(values)
    found = flat(config)
    for name, value in values.items():
        assert found[name] == (tuple(value) if isinstance(value, list) else value), name
    assert again(config) == config


WORDED = ("critic.alone_steps",)


@pytest.mark.parametrize("name", list(FIELDS))
def test_every_field_can_be_set_and_is_written(name: str) -> None:
    words = ("float32", "bfloat16", "chat", "linear", "mask", "int8", "ema:0.5", "drop", "always",
             "after", "anew", "shortest", "last", "keep", "ipc", "knapsack")  # fmt: skip
    values = (*words, "cuda:1", True, False, 7, 0.5, 0.25, ["a"], ["wandb"], ["done"],
              {"exact": 0.5}, {"other": 7}, {"math": "a"})  # fmt: skip
    other = next(x for x in values if x != DEFAULTS[name] and _takes(name, x))
    config = load(**{name: other})
    assert flat(config)[name] == (tuple(other) if isinstance(other, list) else other)
    # A word may stand for a number: critic.alone_steps.
    assert type(flat(config)[name]) in (type(DEFAULTS[name]), *([int] if name in WORDED else []))
    assert again(config) == config
    assert any(change.key.startswith(name) for change in difference(load(), config))


def _takes(name: str, value: Any) -> bool:
    try:
        load(**{name: value})
    except ConfigError:
        return False
    return True


def test_the_text_carries_the_comments_of_the_fields() -> None:
    written = text(load())
    assert 'weights = "shared"  # weights that sample: "shared", the learner\'s own;' in written
    assert "[engine]  # The sampler." in written
    assert (
        "micro_tokens = 0  # tokens in one forward and backward pass; 0: 1,024 on a CPU" in written
    )
    assert written.count("\neval = ") == 1  # data.eval, which has a table's name


def test_the_page_of_settings_has_every_field_with_default_range_meaning_and_resume_rule() -> None:
    page = settings_page()
    assert (ROOT / "docs" / "settings.md").read_text("utf-8") == page, "run `make docs`"
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == list(FIELDS)
    assert all(row[3].strip() for row in rows)  # each says what it is
    for row in (
        "| `engine.top_p` | `1.0` | a number in (0, 1] | sample from the most probable tokens "
        "with this total probability; below 1 only with a recipe that corrects for it, such as tis "
        "| yes |",
        "| `seed` | `0` | a whole number >= 0 | seed of the order of the data and of every sample "
        "| no |",
        '| `engine.weights` | `"shared"` | `shared`, `fp8`, `int8`, `stale:K`, `noise:X` | ',
        '| `adapter.targets` | `"all"` | a text or a list | ',
    ):
        assert row in page


def test_control_characters_are_escaped() -> None:
    odd = 'a"b\\c\n\t\x00\x1f\x7f é 🙂 #'
    config = load(data={"system": odd}, engine={"stop": [odd]}, reward={"parts": {odd: 1}})
    assert again(config) == config
    with pytest.raises(ConfigError, match="no valid text"):
        load(**{"data.system": "\ud800"})


# --- sources ----------------------------------------------------------------------------------


def test_a_file_goes_under_keywords_and_keywords_under_overrides(tmp_path: Path) -> None:
    path = file(
        tmp_path, "steps = 1\ngroup_size = 2\nseed = 3\n[engine]\nmax_tokens = 4\nslots = 5"
    )
    config = load(path, ["steps=100", "engine.max_tokens=400"], steps=10, group_size=20)
    assert (config.steps, config.group_size, config.seed) == (100, 20, 3)
    assert (config.engine.max_tokens, config.engine.slots) == (400, 5)
    assert config.prompts_per_step == DEFAULTS["prompts_per_step"]
    assert load(str(path), ["seed=7", "seed=8"]).seed == 8  # the last one counts


def test_all_ways_of_saying_it_say_the_same(tmp_path: Path) -> None:
    wanted = load({"optim": {"learning_rate": 1e-5}})
    assert wanted.optim.learning_rate == 1e-5
    assert load(**{"optim.learning_rate": 1e-5}) == wanted
    assert load(optim={"learning_rate": 1e-5}) == wanted
    assert load(overrides=["optim.learning_rate=1e-5"]) == wanted
    assert load(overrides=["optim={learning_rate = 1e-5}"]) == wanted
    assert load(file(tmp_path, "optim.learning_rate = 1e-5")) == wanted
    assert load(file(tmp_path, '"optim.learning_rate" = 1e-5')) == wanted
    assert load_config(None, ["optim.learning_rate = 0.00001"]) == wanted


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("data.train=my file.jsonl", "data.train", "my file.jsonl"),
        ('data.train="my file.jsonl"', "data.train", "my file.jsonl"),
        ("data.prompt_key=1", "data.prompt_key", "1"),  # a text all the same
        ("data.prompt_key=true", "data.prompt_key", "true"),
        ("data.prompt_key=2024-01-01", "data.prompt_key", "2024-01-01"),
        ("data.system=a = b", "data.system", "a = b"),
        ("data.system=", "data.system", ""),
        ("data.shuffle=false", "data.shuffle", False),
        ("data.shuffle=False", "data.shuffle", False),
        ("data.size=10_000", "data.size", 10_000),
        ("data.options={digits = 3}", "data.options", {"digits": 3}),
        ("data.options={'digits': 3}", "data.options", {"digits": 3}),
        ("data.options.digits=3", "data.options", {"digits": 3}),
        ('engine.stop=["\\n", "###"]', "engine.stop", ("\n", "###")),
        ("engine.stop=('a', 'b')", "engine.stop", ("a", "b")),
        ("engine.temperature=1", "engine.temperature", 1.0),
        ("engine.weights=stale:2", "engine.weights", "stale:2"),
        ("reference.update=ema:0.99", "reference.update", "ema:0.99"),
        ("overlong=drop", "overlong", "drop"),
        ("reward.parts.exact=0.5", "reward.parts", {"row": 1.0, "exact": 0.5}),
        ("reward.parts={exact = 2}", "reward.parts", {"exact": 2.0}),
        ('reward.parts={"exact": 2}', "reward.parts", {"exact": 2.0}),
        ("reward.parts.mine.py:f=2", "reward.parts", {"row": 1.0, "mine.py:f": 2.0}),
        ("reward.parts.format(pattern='a.b=c')=2", "reward.parts",
         {"row": 1.0, "format(pattern='a.b=c')": 2.0}),
        ("reward.parts.\"format(pattern='a.b=c')\"=2", "reward.parts",
         {"row": 1.0, "format(pattern='a.b=c')": 2.0}),
    ],
)  # fmt: skip
def test_overrides_are_read_as_their_field_needs_them(override: str, name: str, value: Any) -> None:
    found = flat(load(overrides=[override]))[name]
    assert found == value and type(found) is type(value)


def test_parts_of_a_file_take_the_place_of_the_default(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        '[reward.parts]\n"format(pattern=\'a.b\')" = 0.5\n"mine.py:f" = 1\n',
    )
    assert load(path).reward.parts == {"format(pattern='a.b')": 0.5, "mine.py:f": 1.0}
    added = load(path, ["reward.parts.exact=2"]).reward.parts
    assert added == {"format(pattern='a.b')": 0.5, "mine.py:f": 1.0, "exact": 2.0}


def test_files_beside_the_configuration_are_meant_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sub/rows.jsonl", "sub/mine.py", "sub/held.jsonl", "rows.jsonl", "here.jsonl"):
        file(tmp_path, "", name)
    for name in ("sub/model", "sub/tiny", "sub/arithmetic"):
        (tmp_path / name).mkdir()
    content = """
        data.train = "rows.jsonl"
        data.eval = "here.jsonl"
        model.path = "model"
        reward.parts = { "mine.py:f" = 1.0, "other.py:f" = 1.0, number = 1.0 }
    """
    path = file(tmp_path, content, "sub/run.toml")
    config = load(Path("sub/run.toml"))
    assert config.data.train == "sub/rows.jsonl" and config.data.eval == "here.jsonl"
    assert config.model.path == "sub/model"
    assert list(config.reward.parts) == ["sub/mine.py:f", "other.py:f", "number"]
    # Overrides are typed in the working folder, and the embedded parts are no files.
    assert load(path, ["data.train=rows.jsonl"]).data.train == "rows.jsonl"
    built_in = load(file(tmp_path, 'data.train = "arithmetic"\nmodel.path = "tiny"', "sub/b.toml"))
    assert (built_in.data.train, built_in.model.path) == ("arithmetic", "tiny")


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("group_siz", "'group_size'"),
        ("lerning_rate", "'optim.learning_rate'"),
        ("optim.lerning_rate", "'optim.learning_rate'"),
        ("engine.temprature", "'engine.temperature'?"),
        ("temperature", "'engine.temperature' or 'eval.temperature'"),
        ("sampler.max_tokens", "'engine.max_tokens'"),
        ("reward.part", "'reward.parts'"),
        ("recip", "'recipe'"),
        ("gate.high", "'recipe.gate.high'"),
        ("model.path.x", "'model.path'"),
        ("xyzzy", "--dry-run"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, near: str) -> None:
    for wrong in (lambda: load(overrides=[f"{key}=1"]), lambda: load(**{key: 1})):
        with pytest.raises(ConfigError) as caught:
            wrong()
        assert f"There is no setting {key!r}." in str(caught.value) and near in str(caught.value)


def test_unknown_keys_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, "[engine]\nmax_token = 3\n")
    with pytest.raises(ConfigError, match=r"run\.toml: There is no setting 'engine\.max_token'"):
        load(path)


@pytest.mark.parametrize("name", list(ELSEWHERE))
def test_names_of_other_tools_are_explained_and_not_taken(name: str) -> None:
    target = ELSEWHERE[name]
    slot = target.split(".")[1:2]
    assert target in FIELDS or (target.startswith("recipe") and set(slot) <= set(RECIPE_SLOTS))
    for key in (name, f"actor.{name}"):
        with pytest.raises(ConfigError, match=rf"call '{name}' is '{target}' here"):
            load(overrides=[f"{key}=1"])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"steps": True}, "steps must be a whole number >= 1, got True"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"steps": "many"}, "steps must be a whole number"),
        ({"steps": 0}, "steps=0 is out of range"),
        ({"group_size": -1}, "group_size=-1 is out of range"),
        ({"seed": None}, "seed must be a whole number"),
        ({"optim.learning_rate": "fast"}, "optim.learning_rate must be a number >= 0"),
        ({"optim.learning_rate": float("nan")}, "out of range"),
        ({"optim.learning_rate": float("inf")}, "out of range"),
        ({"optim.learning_rate": 10**400}, "out of range"),
        ({"optim.eps": 0}, "must be a number > 0"),
        ({"engine.top_p": 0}, r"in \(0, 1\]"),
        ({"engine.top_p": 1.1}, r"in \(0, 1\]"),
        ({"engine.stop": "###"}, r'engine.stop must be a list such as \["a", "b"\]'),
        ({"engine.stop": [1]}, "engine.stop must be a text, got 1"),
        ({"engine.weights": "int4"}, "'shared', 'fp8', 'int8', 'stale:K' with a number >= 1"),
        ({"engine.weights": "stale:0"}, "unknown"),
        ({"engine.weights": "noise:x"}, "unknown"),
        ({"engine.weights": "noise:inf"}, "unknown"),
        ({"reference.update": "ema:2"}, r"'ema:X' with a number in \(0, 0.999999\]"),
        ({"reference.update": "ema:1"}, "unknown"),
        ({"model.dtype": "float16"}, "Choose one of 'auto', 'float32', 'bfloat16'"),
        ({"model.path": 3}, "model.path must be a text"),
        ({"data.shuffle": 1}, "data.shuffle must be true or false"),
        ({"overlong": "keep"}, "'recipe', 'drop', 'mask', 'penalise'"),
        ({"reward.parts": {"mine": {"py": 1}}}, "quote keys that have dots"),
        ({"reward.parts": {"number": "1"}}, "reward.parts.number must be a number"),
        ({"reward.parts": ["number"]}, "reward.parts must be a table"),
        ({"data.options": {"when": print}}, "data.options.when=.*can't be written down"),
        ({"engine": 3}, "engine is a table of settings"),
        ({"recipe": 3}, 'recipe must be a name such as "dapo"'),
    ],
)
def test_types_and_ranges_are_strict(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(**settings)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no configuration '.*nowhere\.toml'\. `groupwise init .*nowhere"
    ):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="is a folder, and neither a run's nor a configuration"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"no valid TOML: .*line 2"):
        load(file(tmp_path, "steps = 1\nsteps = ]\n"))
    with pytest.raises(ConfigError, match=r"write recipe\.name = "):
        load(file(tmp_path, 'recipe = "dapo"\nrecipe.gate.high = 0.3\n'))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="Can't read"):
        load(binary)
    with pytest.raises(ConfigError, match=r"'steps' sets nothing\. Write key=value"):
        load(overrides=["steps"])


# --- the recipe -------------------------------------------------------------------------------


def test_a_recipe_is_named_and_changed_in_every_form(tmp_path: Path) -> None:
    wanted = recipe("dapo", {"gate.high": 0.3})
    assert load().recipe is recipe("grpo")
    forms = (
        'recipe.name = "dapo"\nrecipe.gate.high = 0.3',
        'recipe = "dapo"\n"recipe.gate.high" = 0.3',
        '[recipe]\nname = "dapo"\ngate = "clip(low=0.2, high=0.3)"',
        '[recipe]\n"gate.high" = 0.3\nname = "dapo"',
        '[recipe]\nname = "dapo"\n[recipe.gate]\nhigh = 0.3',
        '[recipe]\nname = "dapo"\n"gate.high" = 0.3\ngate = "clip(high=0.1)"',
    )
    for form in forms:
        assert load(file(tmp_path, form)).recipe == wanted, form
    assert load(overrides=["recipe.gate.high=0.3", "recipe=dapo"]).recipe == wanted
    assert load(overrides=["recipe=dapo", "recipe.gate=clip(0.2, 0.3)"]).recipe == wanted
    assert load(overrides=["recipe=dapo", 'recipe.gate="clip(0.2, 0.3)"']).recipe == wanted
    assert load(recipe="dapo", **{"recipe.gate.high": 0.3}).recipe == wanted
    assert load(recipe={"name": "dapo", "gate": clip(0.2, 0.3)}).recipe == wanted
    assert load(recipe=wanted).recipe == wanted
    assert load(recipe=recipe("dapo"), overrides=["recipe.gate.high=0.3"]).recipe == wanted
    for config in (load(recipe=wanted), load(overrides=["recipe.penalty="])):
        assert again(config) == config


def test_changes_are_made_at_once_and_later_ones_win() -> None:
    # On the way a token gate would stand on a sequence ratio: only the result must make sense.
    made = load(
        {"recipe": {"name": "gspo", "gate": "clip(low=0.2)"}},
        ["recipe.ratio=token()", "recipe.gate.high=0.25"],
    ).recipe
    assert made.gate == clip(0.2, 0.25) and made.ratio.name == "token"
    # A slot as a whole drops what an earlier source had set inside it.
    made = load({"recipe": {"gate.high": 0.9}}, ["recipe.gate=clip()"]).recipe
    assert made.gate == clip()


def test_what_was_not_changed_keeps_its_name() -> None:
    assert load(recipe="dapo", **{"recipe.gate.high": 0.28}).recipe is recipe("dapo")
    assert load(recipe=recipe("dapo").set("gate.high", 0.28)).recipe is recipe("dapo")
    impostor = recipe("dapo").replace(name="dapo", gate=clip(0.1, 0.1))
    assert load(recipe=impostor).recipe.name == "dapo*"


def test_a_new_name_starts_anew_and_says_so() -> None:
    source = {"recipe": {"name": "dapo", "gate.high": 0.3}}
    with pytest.warns(RecipeWarning, match=r"recipe=gspo takes the place of dapo.*\(gate\.high\)"):
        config = load(source, ["recipe=gspo"])
    assert config.recipe is recipe("gspo")


def test_a_recipe_from_scratch_needs_its_slots() -> None:
    slots = {key: value for key, value in recipe("sapo").text().items() if value}
    config = load(recipe={"name": "mine", **slots})
    assert config.recipe == recipe("sapo").replace(name="mine")
    assert again(config) == config
    changed = load(recipe={"name": "mine", **slots, "gate.tau_pos": 2})
    assert changed.recipe.name == "mine*" and changed.recipe.gate["tau_pos"] == 2.0
    assert again(changed) == changed
    with pytest.raises(RecipeError, match=r"no recipe 'dapoo'\. Did you mean 'dapo'"):
        load(recipe={"name": "dapoo", "gate": "clip()"})


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("recipe=dapoo", "Did you mean 'dapo'"),
        ("recipe.gat.high=0.3", "Did you mean 'gate'"),
        ("recipe.gate.hihg=0.3", "Did you mean 'high'"),
        ("recipe.gate=clipp()", "Did you mean 'clip'"),
        ("recipe.gate.high=wide", "must be a number"),
        ("recipe=nowhere.py:mine", "no file 'nowhere.py'"),
    ],
)
def test_a_wrong_recipe_is_refused(override: str, match: str) -> None:
    with pytest.raises(GroupwiseError, match=match):
        load(overrides=[override])


PLUGIN = """
from groupwise import recipe, register
from groupwise.methods.slots import Positive, gate


@gate(equation="S = {scale}·A")
def flat_of_config(log_ratio_NT, advantage_NT, batch, *, scale: Positive = 1.0):
    return scale * advantage_NT, advantage_NT > 9


register(recipe("lite_ppo").replace(name="flat_lite", gate=flat_of_config(scale=2.0)))
register(recipe("lite_ppo").replace(name="wide_lite", gate="clip(0.4, 0.4)"))
"""


def test_a_plug_in_is_found_beside_the_file_and_again(tmp_path: Path) -> None:
    file(tmp_path, PLUGIN, "mine.py")
    path = file(tmp_path, 'recipe.name = "mine.py:flat_lite"\nrecipe.gate.scale = 3\n')
    config = load(path)
    assert config.recipe.name == "flat_lite*" and config.recipe.gate["scale"] == 3.0
    assert tomllib.loads(text(config))["recipe"]["name"] == f"{tmp_path}/mine.py:flat_lite*"
    assert again(config) == config
    # A recipe of built-in functions needs its file no more once its slots are written down.
    config = load(recipe=f"{tmp_path}/mine.py:wide_lite")
    del RECIPES["wide_lite"]
    assert again(config) == config


# --- overlong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "dapo", "sapo"])
@pytest.mark.parametrize("way", ["mask", "penalise", "drop"])
def test_overlong_becomes_visible_slots(name: str, way: str) -> None:
    config = load(recipe=name, overlong=way, engine={"max_tokens": 40})
    filters = [slot.name for slot in config.recipe.of("filter")]
    shaping = [str(slot) for slot in config.recipe.of("shaping")]
    assert filters.count("overlong") == (way == "mask" or name == "dapo")
    if way == "penalise" and name != "dapo":
        assert shaping == ["soft_overlong(max_length=40, cache=10)"]
    else:
        assert shaping == list(map(str, recipe(name).shaping))
    assert again(config) == config


# --- checks -----------------------------------------------------------------------------------


OF_MIXTURES = ("rspo", "routing_replay", "routing_replay_r3")


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_trains_by_name_or_says_what_it_lacks(name: str) -> None:
    config = load(recipe=name)
    if name in OF_MIXTURES:
        message = (
            f"recipe {name} reads which experts a token visits, and the embedded model is dense"
        )
        with pytest.raises(ConfigError, match=rf"{message}.*or take gspo"):
            check_config(config)
        assert not check_config(load(recipe=name, tiny={"experts": 8}))
    elif set(config.recipe.streams) & set(OF_EPISODES):
        with pytest.raises(ConfigError, match=f"recipe {name} reads .*nothing answers the policy"):
            check_config(config)
        check_config(load(recipe=name, turns={"environment": "guess"}))
    elif name == "sdpo":
        with pytest.raises(ConfigError, match="reads an answer of the group that succeeded"):
            check_config(
                load(recipe=name, **{"teacher.path": "policy", "teacher.update": "ema:0.95"})
            )
        told = {"path": "policy", "update": "ema:0.95", "prompt": "{sibling} {prompt}"}
        assert not check_config(load(recipe=name, teacher=told))
    elif name == "fapo":
        with pytest.raises(ConfigError, match="no part of the reward says so"):
            check_config(config)
        assert not check_config(
            load(recipe=name, **{"reward.parts": {"number": 1.0, f"mine.py:{FLAWED}": 0.0}})
        )
    elif name == "grpo_process":
        (doubt,) = check_config(config)
        assert "hidden charge on going on" in doubt
    elif isinstance(config.recipe, PairRecipe):
        check_config(config)
    elif "teacher" in config.recipe.roles:
        with pytest.raises(ConfigError, match="learns from a teacher, and none is named"):
            check_config(config)
        told = {"path": "policy", "prompt": "{prompt} {solution}"}
        assert not check_config(load(recipe=name, teacher=told))
    elif config.recipe.scores:
        with pytest.raises(ConfigError, match=r"starts from a model, and model\.path=tiny"):
            check_config(config)
        check_config(load(recipe=name, model={"path": "models/some"}))
    else:
        assert not [text for text in check_config(config) if "engine.max_tokens" not in text]


def test_pairs_need_answers_to_choose_between() -> None:
    assert "group_size is 1" in refused(recipe="self_rewarding", group_size=1)
    assert "overlong=mask would be ignored" in refused(recipe="dpo", overlong="mask")
    assert "Set group_size=1" in " ".join(check_config(load(recipe="spin", group_size=8)))
    assert "reset:STEPS" in " ".join(check_config(load(recipe="spin", group_size=1)))
    settings = {"group_size": 1, "reference": {"update": "reset:10"}}
    assert not check_config(load(recipe="spin", **settings))


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(load(**settings))
    return str(caught.value)


def test_an_impossible_batch_is_refused() -> None:
    said = refused(recipe="dapo", prompts_per_step=3, group_size=5)
    assert "3 prompts x 5 samples = 15 completions" in said and "16 updates of dapo" in said
    assert "recipe.schedule.updates=15" in said
    check_config(load(recipe="dapo", prompts_per_step=2, group_size=8))


def test_a_group_of_one_is_refused_where_a_group_is_needed() -> None:
    said = refused(recipe="grpo", group_size=1)
    assert "advantage group_zscore" in said and "reinforce_pp, remax or reinforce" in said
    assert "filter zero_variance" in refused(
        recipe="reinforce_pp", group_size=1, **{"recipe.filter": "zero_variance()"}
    )
    for name in ("reinforce_pp", "remax", "reinforce"):
        check_config(load(recipe=name, group_size=1))


def test_what_needs_a_group_is_found_by_trying_it() -> None:
    """Names by hand; a baseline of the user's own is found like those of the package."""
    alone = {
        "group_mean", "group_zscore", "group_mean_batch_std", "leave_one_out", "maxrl",
        "leave_one_out_zscore", "group_and_batch_mean", "group_and_moving_mean", "process_rloo",
        "process_rloo_release",
        "group_process_zscore", "drift_as_process_reward", "zero_variance", "reject",
        "enough_mixed", "group_zscore_per_part", "length_weighted_mean", "best_minus_second",
        "group_mean_of_peers", "optimal_token_baseline", "tree_mean", "turn_return_to_go",
        "call_credit",
    }  # fmt: skip
    slots = [x() for kind in ("advantage", "filter") for x in REGISTRY[kind].values()]
    assert {slot.name for slot in slots if needs_a_group(slot)} == alone

    @advantage(equation="A = R − the best of the group", base=True)
    def below_the_best(reward_N: Tensor, batch: TokenBatch) -> Tensor:
        best_G = torch.zeros(int(batch.group_N.max()) + 1).double()
        best_G = best_G.scatter_reduce(0, batch.group_N, reward_N.double(), "amax")
        return reward_N - best_G[batch.group_N]

    try:
        said = refused(recipe="grpo", group_size=1, **{"recipe.advantage": "below_the_best()"})
    finally:
        del REGISTRY["advantage"]["below_the_best"]
    assert "advantage below_the_best" in said


@pytest.mark.parametrize(
    ("setting", "reset"),
    [("engine.top_p", "top_p=1"), ("engine.top_k", "top_k=0"), ("engine.min_tokens", "tokens=0")],
)
def test_bug_21_a_narrowed_sampler_is_refused_where_nothing_corrects_it(
    setting: str, reset: str
) -> None:
    value = 0.9 if setting == "engine.top_p" else 5
    said = refused(**{setting: value})
    assert f"{setting}={value}" in said and reset in said and "tis" in said
    check_config(load(recipe="tis", **{setting: value}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine.temperature": 0}, "the same answer every time"),
        ({"engine.min_tokens": 65, "recipe": "tis"}, "more than engine.max_tokens=64"),
        ({"engine.stop": ["\n", ""]}, "engine.stop holds an empty text"),
        ({"engine.exact": True} | ON_CPU, "for a GPU in bfloat16, and this is float32 on cpu"),
        ({"engine.exact": True} | ON_CPU | {"model.device": "cuda"}, "this is float32 on cuda"),
        ({"tiny.width": 100, "tiny.heads": 4}, "multiple of 8"),
        ({"optim.beta2": 1}, "optim.beta2=1"),
        ({"reward.parts": {}}, "reward.parts gives nothing a weight"),
        ({"reward.parts": {"number": 0}}, "reward.parts gives nothing a weight"),
        ({"recipe": "dr_grpo", "reference.update": "ema:0.9"}, "ignored by dr_grpo"),
        ({"optim.exponent_rate": 1}, "take lambda_grpo"),
        ({"refills": 5}, "zero_variance()"),
        ({"engine.weights": "fp8", "recipe": "grpo"}, "does not correct for it"),
    ],
)
def test_what_makes_no_sense_together_is_refused(settings: dict[str, Any], said: str) -> None:
    assert said in refused(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine.top_p": 0.9, "recipe": "tis"}, "can't hold with engine.top_p=0.9: "),
        ({"engine.top_k": 5, "recipe": "tis"}, "can't hold with engine.top_k=5: "),
        ({"engine.weights": "int8"}, "can't hold with engine.weights=int8: "),
        ({"engine.weights": "fp8", "recipe": "tis"}, "can't hold with engine.weights=fp8: "),
        ({"recipe": "dppo_topk"}, "which reads the likeliest tokens: "),
        ({"recipe": "simko"}, "which reads the likeliest tokens: "),
    ],
)
def test_exact_mode_is_refused_where_it_would_not_be_exact(
    settings: dict[str, Any], said: str
) -> None:
    gpu = {"model.device": "cuda", "model.dtype": "bfloat16"}
    assert said in refused(**gpu, **settings, **{"engine.exact": True})
    check_config(load(**gpu, **settings))
    check_config(load(**gpu, **{"engine.exact": True}))


def test_a_knob_that_the_recipe_reads_is_fine() -> None:
    check_config(load(**{"reference.update": "ema:0.9"}))
    check_config(load(recipe="lambda_grpo", **{"optim.exponent_rate": 1}))
    check_config(load(recipe="olmo3", refills=5))
    check_config(load(recipe="olmo3", refills="until full", refill_tokens=1000))
    assert "refills=0 draws nothing again" in refused(recipe="olmo3", refills=0, refill_tokens=9)
    assert load(overrides=["recipe=dapo", "refills=until full"]).refills == "until full"
    assert load(overrides=["recipe=dapo", "refills='until full'"]).refills == "until full"
    assert load(overrides=["recipe=dapo", "refills=7"]).refills == 7
    for wrong in ("until_full", -1, 1.5, True):
        with pytest.raises(ConfigError, match="refills"):
            load(recipe="dapo", refills=wrong)


def test_all_refusals_are_told_at_once() -> None:
    said = refused(recipe="rspo", **{"engine.temperature": 0, "reward.parts": {}})
    assert len(said.splitlines()) == 3


def test_a_configuration_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="group_size=0 is out of range"):
        check_config(replace(load(), group_size=0))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recipe": "dapo"}, "recipe.shaping.soft_overlong.max_length=64 "
                             "recipe.shaping.soft_overlong.cache=16"),
        ({"recipe": "dr_grpo", "engine.max_tokens": 32}, "Write recipe.aggregation.length=32."),
        ({"prompts_per_step": 3, "group_size": 10}, "30 completions a step are few"),
        ({"optim.warmup_steps": 100}, "never arrives"),
        ({"checkpoint": {"every_steps": 0, "every_seconds": 0}}, "starts over"),
        ({"model.path": "folder", "tiny.width": 64}, "tiny.width=64 has no effect"),
        ({"eval.samples": 4}, "set eval.temperature"),
        ({"data.train": "rows.jsonl"}, "no held-out tasks"),
        ({"recipe": "gspo", "recipe.gate": "clip(0.2, 0.2)"}, "GSPO uses clip(0.0003, 0.0004)"),
    ],
)  # fmt: skip
def test_what_is_doubtful_is_told(settings: dict[str, Any], said: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told by check, once, and not on the way
        doubts = check_config(load(**settings))
    assert len([text for text in doubts if said in text]) == 1, doubts


def test_the_advice_about_lengths_can_be_typed() -> None:
    for name in ("dapo", "dr_grpo"):
        (doubt,) = check_config(load(recipe=name))
        typed = [word.rstrip(".") for word in doubt.split() if word.startswith("recipe.")]
        assert typed and check_config(load(overrides=[f"recipe={name}", *typed])) == []


# --- what follows -----------------------------------------------------------------------------


def test_the_batch_is_described_in_numbers() -> None:
    assert describe(load())[0] == (
        "16 prompts x 8 samples = 128 completions a step, 1 update, on-policy"
    )
    assert describe(load(recipe="gspo"))[0].endswith("4 updates, all but the first off-policy")
    assert "2 updates" in describe(load(recipe="lopti"))[0]
    stale = describe(load(**{"engine.weights": "stale:2"}))[0]
    assert stale.endswith("sampled from other weights (stale:2)")
    told = "\n".join(describe(load(recipe="dapo", steps=5)))
    assert "at most 8,192 tokens sampled a step (64 an answer)" in told
    assert "(64 an answer), and what refills draw; " in told
    assert "5 steps draw 80 prompts, and what refills draw" in told
    assert "refills" not in "\n".join(describe(load(steps=5)))
    assert "5 steps draw 80 prompts from 744 tasks" in "\n".join(describe(load(steps=5), tasks=744))
    assert "groups that zero_variance drops are drawn anew, up to 3 times a step" in told
    full = "\n".join(describe(load(recipe="dapo", refills="until full")))
    assert "until the batch is full; refills take ten times its tokens at most" in full
    limited = describe(load(recipe="dapo", refills="until full", refill_tokens=5000))
    assert any("until the batch is full; refills take 5,000 tokens" in line for line in limited)
    assert "reference (frozen)" in "\n".join(describe(load()))
    spin = "\n".join(describe(load(recipe="spin", group_size=1)))
    assert (
        "chosen: the data's written `completion` or `solution`, rejected: a sample of the" in spin
    )
    assert "not as published: samples of the round before are not mixed in again" in spin
    graded = {"recipe": "best_of_group_dpo", "reward.parts": {"number": 2.0}}
    told = "\n".join(describe(load(**graded)))
    assert "the best and the worst of 8 samples by the reward (number x 2)" in told
    judged = "\n".join(describe(load(**graded | {"recipe": "self_rewarding"})))
    assert "the best and the worst of 8 samples, by what the policy itself says of them" in judged
    assert (
        "3 judgements of each answer, temperature 0.7, top-p 0.9; at most 98,304 tokens" in judged
    )
    assert "reward.parts (number x 2) says which answers are right" in judged
    assert "stops by itself when a rule of judge gap, judge agreement fires" in judged
    assert "columns `chosen` and `rejected`" in "\n".join(describe(load(recipe="dpo")))
    assert describe(load(**{"data.train": "rows.jsonl"}))[-1] == "no held-out evaluation"
    for name in RECIPES:
        assert describe(load(recipe=name))


@pytest.mark.parametrize(
    ("changes", "known", "told"),
    [
        ({}, None, "micro-batches of 1,024 tokens (automatic)"),
        ({}, 512, "micro-batches of 512 tokens (automatic)"),
        ({"optim.micro_tokens": 4096}, None, "micro-batches of 4,096 tokens"),
        ({"optim.micro_tokens": 4096}, 2048, "micro-batches of 2,048 tokens"),
        ({"model.device": "cuda"}, None, "micro-batches as large as memory allows (automatic)"),
        ({"model.device": "cuda"}, 8192, "micro-batches of 8,192 tokens (automatic)"),
    ],
)
def test_micro_batches_are_described(changes: dict[str, Any], known: int | None, told: str) -> None:
    (line,) = (x for x in describe(load(**changes), known) if "micro-batches" in x)
    assert line.endswith(f"; {told}")


# --- what a resumed run may change ------------------------------------------------------------


def test_every_field_has_a_verdict_for_resume() -> None:
    for name in FIELDS:
        assert any(f"{name}.".startswith(f"{known}.") for known in RESUME), name
    for known in RESUME:
        assert any(f"{name}.".startswith(f"{known}.") for name in FIELDS), known


@pytest.mark.parametrize(
    ("settings", "compatible"),
    [
        ({"steps": 7}, True),
        ({"optim.learning_rate": 1e-3}, True),
        ({"optim.micro_tokens": 1}, True),
        ({"eval.every": 1}, True),
        ({"checkpoint.keep": 9}, True),
        ({"guard.mismatch": 1}, True),
        ({"engine.temperature": 0.5}, True),
        ({"engine.stop": ["x"]}, True),
        ({"reward.parts": {"row": 2}}, True),
        ({"recipe.gate.high": 0.3}, True),
        ({"recipe.penalty.coef": 0.01}, True),
        ({"seed": 1}, False),
        ({"model.path": "other"}, False),
        ({"model.dtype": "bfloat16"}, False),
        ({"tiny.width": 64}, False),
        ({"data.train": "countdown"}, False),
        ({"data.options": {"digits": 3}}, False),
        ({"engine.weights": "int8"}, False),
        ({"reference.update": "ema:0.9"}, False),
        ({"recipe.gate": "soft()"}, False),
        ({"recipe.penalty": ""}, False),
    ],
)
def test_one_change_is_found_and_judged(settings: dict[str, Any], compatible: bool) -> None:
    (change,) = difference(text(load()), load(**settings))
    assert change.compatible is compatible and change.reason
    (key,) = settings
    assert change.key.startswith("recipe.") if "recipe" in key else change.key.startswith(key)
    assert " -> " in str(change) and change.reason in str(change)
    assert difference(load(**settings), text(load(**settings))) == []


def test_another_recipe_is_another_run() -> None:
    changes = {change.key: change for change in difference(load(), load(recipe="dapo"))}
    assert not changes["recipe.name"].compatible and not changes["recipe.filter"].compatible
    assert changes["recipe.gate"].compatible  # clip both, with other numbers
    lam = {"recipe": "lambda_grpo"}
    (change,) = difference(load(**lam), load(**lam, **{"recipe.aggregation.exponent": 0.5}))
    assert not change.compatible and "checkpoint" in change.reason


def test_a_text_of_another_version_can_be_compared() -> None:
    old = text(load()).replace("\nrefills = 3", "\nretired = 1 #")
    (change,) = difference(old, load())
    assert (change.key, change.old, change.new, change.compatible) == ("retired", 1, None, False)
    (_, change) = difference(old, load(recipe="grpo", refills=4))
    assert (change.key, change.old, change.new) == ("refills", 3, 4)


def test_entries_of_parts_are_compared_one_by_one() -> None:
    (change,) = difference(load(), load(overrides=["reward.parts.mine.py:f=1"]))
    assert (change.key, change.old, change.new) == ("reward.parts.mine.py:f", None, 1.0)
    assert str(change).startswith("reward.parts.mine.py:f: none -> 1.0 (")


# --- the examples -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_examples_are_sound(path: Path) -> None:
    config = load(path)
    assert check_config(config) == []
    assert again(config) == config
    assert isinstance(config.recipe, Recipe)
    if path.name == "tiny.toml":
        assert config.model.path == "tiny" and config.recipe.schedule["updates"] > 1
        assert "zero_variance" in [slot.name for slot in config.recipe.filter]
        assert 0 < config.checkpoint.every_seconds <= 5
