"""A user's own files, names and text: mistakes are told in words, and changes are told as well."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from groupwise import recipe, register
from groupwise.cli import main
from groupwise.common.user_files import code_files
from groupwise.errors import RecipeError
from groupwise.explain.explain import algorithm_pages, explain, notes, slot_functions
from groupwise.explain.render import explain_text
from groupwise.losses.gates import clip, constant
from groupwise.methods.composition import PairRecipe, Recipe
from groupwise.methods.method import About
from groupwise.methods.slots import REGISTRY, find, parse, shown
from groupwise.recipes import RECIPES, load_plugin


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), "utf-8")
    return path


GATE = """
from groupwise import recipe, register
from groupwise.methods.slots import Positive, gate


@gate(equation="S = {scale}·A")
def flat(log_ratio_NT, advantage_NT, batch, *, scale: Positive = 1.0):
    return scale * advantage_NT, advantage_NT > 9


register(recipe("dapo").replace(name="flat_dapo", gate=flat(scale=2.0)))
"""


# --- files that fail --------------------------------------------------------------------------


def test_a_file_imports_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a module of that name of another folder; and it is part of the recipe's code."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = {}
    for name, scale in (("one", 7.0), ("two", 9.0)):
        (tmp_path / name).mkdir()
        written(tmp_path / name, f"SCALE = {scale}", "scale_beside.py")
        text = "from scale_beside import SCALE\n" + GATE.replace("scale=2.0", "scale=SCALE")
        path = written(tmp_path / name, text.replace("flat", f"beside_{name}"), "lies_beside.py")
        found[name] = recipe(f"{path}:beside_{name}_dapo")
        assert found[name].gate["scale"] == scale
        assert recipe(f"{path}:beside_{name}_dapo") is found[name]  # loaded once
    assert recipe(f"{tmp_path}/one/lies_beside.py:beside_one_dapo") is found["one"]
    before = {name: each.code() for name, each in found.items()}
    written(tmp_path / "two", "SCALE = 8.0", "scale_beside.py")
    assert found["one"].code() == before["one"]
    assert found["two"].code() != before["two"]


def test_a_file_does_not_hide_what_is_installed_from_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    written(tmp_path, "", "colorsys.py")
    text = "from colorsys import rgb_to_hsv\n" + GATE.replace("flat", "behind_flat")
    assert recipe(f"{written(tmp_path, text, 'behind.py')}:behind_flat_dapo")


def test_the_files_that_a_file_imports(tmp_path: Path) -> None:
    for path, text in {
        "mine.py": "import os, sub.inner\nfrom helper import x\ndef late():\n    import lazy",
        "helper.py": "import mine, again",  # in a circle
        "again.py": "x = (",  # broken
        "lazy.py": "from numpy import array",
        "unused.py": "",
        "sub/__init__.py": "",
        "sub/inner.py": "from . import sister\nfrom .deep import thing\nfrom .. import helper",
        "sub/sister.py": "",
        "sub/deep/thing.py": "",  # no __init__: a package by its folder
        "os/other.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path, text, path)
    wanted = ["again.py", "helper.py", "lazy.py", "mine.py"]
    wanted += [f"sub/{name}.py" for name in ("__init__", "deep/thing", "inner", "sister")]
    assert code_files(tmp_path / "mine.py") == [f"{tmp_path}/{name}" for name in wanted]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("x = 1\nimport no_such_module_here\n", 2, "ModuleNotFoundError: No module named"),
        ("x = 1\n\ndef half(:\n", 3, "SyntaxError: invalid syntax"),
        ("def f():\n    return missing\n\nf()\n", 2, "NameError: name 'missing'"),
        ("import sys\nsys.exit(0)\n", 2, "SystemExit: 0"),
        ("from groupwise import recipe\nrecipe('dapoo')\n", 2, "Did you mean 'dapo'"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(
    text: str, line: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text, "bad.py")
    with pytest.raises(RecipeError) as caught:
        recipe(f"{path}:x")
    assert f"bad.py, line {line}: " in str(caught.value) and why in str(caught.value)
    assert caught.value.__cause__ is not None  # the traceback is still there for who wants it
    assert main(["explain", f"{path}:x"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("groupwise: ") and f"line {line}" in err
    assert "Traceback" not in err


def test_a_name_that_a_file_does_not_have(tmp_path: Path) -> None:
    """What is offered can be typed: with the file, and of the file."""
    path = written(tmp_path, GATE)
    with pytest.raises(RecipeError) as caught:
        recipe(f"{path}:flat_dap")
    assert str(caught.value).endswith(f"in {path}. Did you mean '{path}:flat_dapo'?")
    bare = written(tmp_path, "", "bare.py")
    with pytest.raises(RecipeError, match=r"bare\.py\. None at all: does the file call register"):
        recipe(f"{bare}:dapoo")
    with pytest.raises(RecipeError, match="Did you mean 'dapo'"):
        recipe("dapoo")


def test_a_file_that_failed_leaves_nothing_and_loads_when_mended(tmp_path: Path) -> None:
    before = set(RECIPES), set(REGISTRY["gate"])
    path = written(tmp_path, GATE + "\nraise OSError('disk')\n")
    with pytest.raises(RecipeError, match="OSError: disk"):
        load_plugin(str(path))
    assert (set(RECIPES), set(REGISTRY["gate"])) == before
    path.write_text(GATE.replace("scale=2.0", "scale=3.0"), "utf-8")
    assert recipe(f"{path}:flat_dapo").gate["scale"] == 3.0


# --- decorators that are used wrongly ---------------------------------------------------------


HEAD = "from groupwise.slots import *\nfrom groupwise.slots import filter_, gate, penalty\n"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("@gate\ndef g(a, b, c): ...", r"write @gate\(equation="),
        ("@gate()\ndef g(a, b, c): ...", r"write @gate\(equation="),
        ("@gate(fixes='all')\ndef g(a, b, c): ...", r"write @gate\(equation="),
        ("@filter_\ndef g(batch): ...", r"write @filter_\(equation="),
        ("@gate(equation='S = {q}·A')\ndef g(a, b, c, *, p: Positive = 1.0): ...",
         r"gate g: its equation names \{q\}.*hyper-parameters \(p\)"),
        ("@gate(equation='S = {}')\ndef g(a, b, c): ...", "gate g: its equation"),
        ("@gate(equation='S = {')\ndef g(a, b, c): ...", "gate g: its equation"),
        ("@gate(equation='S')\ndef g(a, b): ...",
         r"gate g must take 3 positional .*log_ratio_NT, advantage_NT, batch.*got \(a, b\)"),
        ("@gate(equation='S')\ndef g(a, b, c, p=1.0): ...",
         r"got \(a, b, c, p=1.0\).*behind the star"),
        ("@gate(equation='S')\ndef g(*args): ...", r"got \(\*args\)"),
        ("@gate(equation='S')\ndef g(a, b, c, **more): ...", r"got \(a, b, c, \*\*more\)"),
        ("@penalty(equation='S')\ndef g(batch, x): ...", r"penalty g must take 1 positional"),
        ("@gate(equation='S')\ndef g(a, b, c, *, p=1.0): ...",
         r"gate g: p must be annotated.*NonNegative, Positive.*Count.*Literal"),
        ("@gate(equation='S')\ndef g(a, b, c, *, p: float = 1.0): ...", "p must be annotated"),
        ("@gate(equation='S')\ndef g(a, b, c, *, p: list[int] = 1.0): ...", "p must be annotated"),
        ("@gate(equation='S')\ndef g(a, b, c, *, p: 'Positiv' = 1.0): ...",
         r"name 'Positiv' is not defined.*Positive"),
        ("@gate(equation='S')\ndef g(a, b, c, *, p: Positive = 0.0): ...", "p=0.0 is out of range"),
    ],
)  # fmt: skip
def test_a_wrong_decoration_is_refused_where_it_stands(
    text: str, match: str, tmp_path: Path
) -> None:
    known = {kind: set(slots) for kind, slots in REGISTRY.items()}
    path = written(tmp_path, HEAD + text + "\n", "wrong.py")
    with pytest.raises(RecipeError, match=match) as caught:
        load_plugin(str(path))
    assert "wrong.py, line 3" in str(caught.value) or "wrong.py, line 4" in str(caught.value)
    assert {kind: set(slots) for kind, slots in REGISTRY.items()} == known


def test_types_that_only_a_checker_sees_do_no_harm(tmp_path: Path) -> None:
    text = """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        from groupwise.methods.slots import Positive, penalty
        if TYPE_CHECKING:
            from groupwise import TokenBatch

        @penalty(equation="{w}·x")
        def typed(batch: TokenBatch, *, w: Positive = 1.0) -> Tensor: ...
    """
    load_plugin(str(written(tmp_path, text)))
    assert str(parse("penalty", "typed")[0]) == "typed(w=1.0)"


def test_a_name_is_redefined_by_its_own_file_only(tmp_path: Path) -> None:
    mine = written(tmp_path, GATE)
    load_plugin(str(mine))
    again = {"__name__": "__main__"}  # the same file, run as a script
    exec(compile(GATE.replace("> 9", "> 8"), str(mine.resolve()), "exec"), again)
    assert REGISTRY["gate"]["flat"] is again["flat"]
    other = written(tmp_path, GATE, "other.py")
    with pytest.raises(RecipeError, match=r"gate 'flat' is already defined in .*mine\.py"):
        load_plugin(str(other))
    with pytest.raises(RecipeError, match=r"gate 'clip' is already defined in groupwise\.losses"):
        load_plugin(str(written(tmp_path, GATE.replace("flat", "clip"), "third.py")))
    assert REGISTRY["gate"]["flat"] is again["flat"]


# --- a changed recipe says that it is changed -------------------------------------------------


def test_a_derived_recipe_does_not_wear_its_parents_badge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, GATE)
    about = recipe(f"{path}:flat_dapo").about
    assert (about.title, about.paper, about.year) == ("derived from dapo", "", 0)
    assert (about.family, about.fixes, about.note) == ("your own", "", "")
    assert main(["explain", f"{path}:flat_dapo"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("flat_dapo: derived from dapo (2503.14476)\n")
    assert "differs     gate: clip(low=0.2, high=0.28) → flat(scale=2.0)" in out
    assert "entropy collapse" not in out and "DAPO" not in out
    data = explain("flat_dapo")
    assert data["derived"]["from"] == "dapo" and set(data["derived"]["differs"]) == {"gate"}


def test_the_automatic_name_says_what_it_was_changed_from() -> None:
    made = recipe("dapo", {"gate.high": 0.3}).set("gate.low", 0.1)
    assert made.name == "dapo*" and made.about.base is recipe("dapo")
    text = explain_text(explain(made), 100)
    assert text.startswith("dapo*: derived from dapo (2503.14476)")
    assert "gate: clip(low=0.2, high=0.28) → clip(low=0.1, high=0.3)" in text
    assert made.replace(name="mine").about.title == "derived from dapo"
    named = recipe("dapo").replace(name="mine", gate=clip(0.1, 0.1))
    assert named.replace(name="yours").about.title == "derived from mine"
    assert pickle.loads(pickle.dumps(made)).about.base == recipe("dapo")


def test_ones_own_about_stays_and_the_package_derives_from_nothing() -> None:
    about = About("Mine", paper="2601.00001")
    assert recipe("dapo").replace(name="mine", about=about, gate=clip()).about is about
    assert recipe("dapo").replace(name="dapo").about is recipe("dapo").about
    assert all(RECIPES[name].about.base is None for name in notes())
    changed = recipe("dpo").replace(name="mine", reference="the last checkpoint")
    assert explain(changed)["derived"]["differs"] == {
        "reference": {"a": recipe("dpo").reference, "b": "the last checkpoint"}
    }


# --- text -------------------------------------------------------------------------------------


def test_pair_recipes_take_dotted_settings() -> None:
    made = recipe("dpo", {"preference.beta": 0.3})
    assert isinstance(made, PairRecipe) and made.preference["beta"] == 0.3
    assert made == recipe("dpo").set("preference.logistic.beta", "0.3")
    assert made == recipe("dpo").configure({"recipe.preference": "logistic(0.3)"})
    assert (made.name, made.about.title) == ("dpo*", "derived from dpo")
    with pytest.raises(RecipeError, match=r"no slot 'gate'.*pairing, preference"):
        recipe("dpo", {"gate.high": 0.3})
    with pytest.raises(RecipeError, match=r"would ignore it, its preference is logistic.*beta"):
        recipe("dpo", {"preference.betta": 0.3})


def test_a_path_reaches_into_slots_inside_slots(tmp_path: Path) -> None:
    for path in ("gate.width.low", "gate.segment_clip.width.low", "gate.width.constant.low"):
        assert recipe("sspo", {path: 0.1}).gate["width"] == constant(0.1, 0.2)
    assert recipe("sspo", {"gate.width": "constant(0.1, 0.3)"}).gate["width"] == constant(0.1, 0.3)
    with pytest.raises(RecipeError, match=r"gate\.width\.lo: 'sspo' would ignore it"):
        recipe("sspo", {"gate.width.lo": 0.1})
    with pytest.raises(RecipeError, match="would ignore it"):
        recipe("dapo", {"gate.high.low": 0.1})
    text = """
        from groupwise.losses.gates import constant
        from groupwise.methods.slots import Positive, Slot, width

        @width(equation="{times}·({inner})")
        def wider(segment_entropy_NT, *, inner: Slot = constant(), times: Positive = 2.0):
            low, high = inner(segment_entropy_NT)
            return times * low, times * high
    """
    load_plugin(str(written(tmp_path, text)))
    made = recipe("sspo", {"gate.width": "wider(inner=wider())"})
    made = made.set("gate.width.inner.inner.high", "0.4")
    assert str(made.gate) == (
        "segment_clip(width=wider(inner=wider(inner=constant(low=0.2, high=0.4), times=2.0), "
        "times=2.0))"
    )
    assert made.code() and not recipe("sspo").code()  # a file of the user's, inside the package's


def test_text_values_are_read_as_literals() -> None:
    assert recipe("dapo", {"gate.high": "0.3"}).gate == clip(0.2, 0.3)
    assert recipe("dapo", {"gate.high": " 3e-1 "}).gate == clip(0.2, 0.3)
    assert recipe("dapo", {"schedule.updates": "4"}).schedule["updates"] == 4
    for text in ("k2", "'k2'", '"k2"'):
        assert recipe("grpo", {"penalty.estimator": text}).penalty[0]["estimator"] == "k2"
    for text in ("high", "None", "True", "[0.3]", "0.3 + 0.1", ""):
        with pytest.raises(RecipeError, match=r"high=.* must be a number"):
            recipe("dapo", {"gate.high": text})
    with pytest.raises(RecipeError, match="must be a number"):  # a slot itself stays strict
        clip(high="0.3")


def test_none_is_empty() -> None:
    empty = recipe("grpo").replace(penalty="none")
    assert empty.penalty == ()
    assert recipe("grpo").replace(penalty=None) == empty == recipe("grpo", {"penalty": None})
    with pytest.raises(RecipeError, match="exactly one gate, got 0"):
        recipe("grpo").replace(gate=None)


@pytest.mark.parametrize("wrong", [None, 3, ["dapo"], b"dapo"])
def test_a_wrong_name_or_entry_is_refused_in_words(wrong: Any) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"by its name, got {wrong!r}")):
        recipe(wrong)
    with pytest.raises(RecipeError, match="register takes a recipe, got"):
        register(wrong)
    if wrong is not None:
        with pytest.raises(RecipeError, match="must be a mapping"):
            recipe("dapo", wrong)


def test_register_and_replace_refuse_what_they_do_not_know() -> None:
    with pytest.raises(RecipeError, match="register takes a recipe, got 'x'"):
        register("x")  # type: ignore[arg-type]
    for key in ("KINDS", "gates", "WORD"):
        with pytest.raises(RecipeError, match=f"no slot '{key}'"):
            recipe("dapo").replace(**{key: "clip()"})


# --- pickles ----------------------------------------------------------------------------------


def elsewhere(pickled: bytes, first: str = "") -> subprocess.CompletedProcess[str]:
    """Unpickle in a fresh process."""
    script = f"import pickle\n{first}\nprint(pickle.loads({pickled!r}))"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_a_pickle_needs_the_file_it_came_from(tmp_path: Path) -> None:
    path = written(tmp_path, GATE)
    pickled = pickle.dumps(recipe(f"{path}:flat_dapo").gate)
    lost = elsewhere(pickled)
    last = lost.stderr.strip().splitlines()[-1]
    assert lost.returncode == 1 and last.startswith("groupwise.errors.RecipeError: ")
    assert "gate 'flat'" in last and "mine.py" in last and "Load that file first" in last
    load = f"from groupwise.recipes import load_plugin; load_plugin({str(path)!r})"
    found = elsewhere(pickled, load)
    assert found.stdout.strip() == "flat(scale=2.0)", found.stderr


def test_the_packages_own_slots_unpickle_and_parse_anywhere() -> None:
    found = elsewhere(pickle.dumps(clip(0.2, 0.3)))
    assert found.stdout.strip() == "clip(low=0.2, high=0.3)", found.stderr
    script = "from groupwise import Recipe; print(Recipe.from_text('mine', {}).gate)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == str(clip()), done.stderr


# --- equations and notes ----------------------------------------------------------------------


def test_equations_are_shown_without_braces_and_idle_factors() -> None:
    assert shown("A = R − mean_{j≠i} R_j") == "A = R − mean_(j≠i) R_j"
    assert shown("Σ_{s≥t} 1^(s−t) · r_s") == "Σ_(s≥t) r_s"
    assert shown("Σ_l (1·1)^l δ_{t+l}") == "Σ_l δ_(t+l)"
    assert shown("(1·0.95)^l δ_{t+l} + 1·V_{t+1}") == "0.95^l δ_(t+l) + V_(t+1)"
    for kept in ("1[t=n]·R", "R·1[t=n]", "11·V", "0.1·V", "x^1·y", "a/1·b", "1−0.2", "clip(1)^2"):
        assert shown(kept) == kept
    lines = [line["equation"] for name in notes() for line in explain(name)["equation"]]
    lines += [function["equation"] for function in slot_functions()]
    assert lines and not [line for line in lines if re.search(r"[{}]|(?<![\w.])1·|1\^", line)]
    assert not [name for name, page in algorithm_pages().items() if "_{" in page]


def test_notes_say_what_a_reader_would_trip_over() -> None:
    found = {name: " ".join(e["pitfalls"] + e["disagree"]) for name, e in notes().items()}
    assert "simplified form of PRIME that several articles give" in found["prime_seed"]
    assert "sg[r]·A·ℓ" in found["grpo@prime-rl"] and "same gradient" in found["grpo@prime-rl"]
    assert "`refill`" in found["grpo@open-instruct"]
    assert "Group ids" in found["dcpo"]


def test_the_example_of_the_guide_works(tmp_path: Path) -> None:
    guide = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    made = recipe(f"{written(tmp_path, example, 'guide.py')}:tanh_dapo")
    assert isinstance(made, Recipe) and explain(made)["derived"]["from"] == "dapo"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('@gate(equation="x", levl="token")', "levl= is no fact that is known of a slot.*'level'"),
        ('@ratio(equation="x")', 'must say its level: level="none" or level="token" or'),
    ],
)
def test_facts_about_a_slot_are_words_that_are_known(text: str, said: str, tmp_path: Path) -> None:
    arguments = "log_ratio_NT, advantage_NT, batch" if "gate" in text else "batch"
    path = written(tmp_path, f"from groupwise.slots import *\n{text}\ndef odd({arguments}): ...\n")
    with pytest.raises(RecipeError, match=said):
        load_plugin(str(path))


FORKING = """
import os
from typing import Literal
from groupwise.methods.slots import gate

@gate(equation="S = A")
def forking(log_ratio_NT, advantage_NT, batch, *, how: Literal["returns", "leaves", "fails"]):
    child = os.fork()
    if child == 0:
        if how == "leaves":
            raise SystemExit(3)
        return 1 / (how == "returns")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize(("how", "status"), [("returns", 0), ("leaves", 3), ("fails", 1)])
def test_a_child_that_a_slot_forks_does_not_go_on_as_a_second_trainer(
    how: str, status: int, tmp_path: Path
) -> None:
    load_plugin(str(written(tmp_path, FORKING)))
    own, second = os.getpid(), tmp_path / "second"
    try:
        found = find("gate", "forking")(how=how)(None, None, None)
    finally:
        if os.getpid() != own:
            second.touch()
            os._exit(0)
    assert found == status and not second.exists()
