"""Reward models and process reward models from tiny folders, against transformers itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from groupwise.data.steps import last_tokens, step_ends
from groupwise.errors import DataError, RewardError
from groupwise.graders.parts import SampleToGrade, built_in
from groupwise.graders.rubric import Grader
from groupwise.graders.scorers import NOWHERE, Reading, prm, rm
from groupwise.records import Task

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def folder_of(path, auto, labels, template=None, **changes):
    """A random model that reads characters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | changes, num_labels=labels)
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(path)
    vocabulary = {"<pad>": 0} | {chr(code): code for code in range(1, 128)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rm")
    return folder_of(path, transformers.AutoModelForSequenceClassification, 1)


@pytest.fixture(scope="module")
def step_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("prm")
    return folder_of(path, transformers.AutoModelForTokenClassification, 2)


def samples(*texts, prompt="ask: "):
    return [SampleToGrade(Task(i, prompt), text, (), "eos") for i, text in enumerate(texts)]


def ids(text):
    return torch.tensor([[ord(letter) for letter in text]])


def test_a_reward_model_scores_whole_texts_in_any_batch(reward_folder):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reward_folder).eval()
    texts = ["a", "a longer answer", "b", "something quite a bit longer than that"]
    expected = [float(model(ids("ask: " + text)).logits[0, 0].detach()) for text in texts]
    for batch in (1, 3):
        marks = rm(("<e>",), path=reward_folder, batch=batch).grade(
            samples(*(text + "<e>" for text in texts))
        )
        assert [mark.value for mark in marks] == pytest.approx(expected, abs=1e-5)
    (squashed,) = rm((), path=reward_folder, squash="sigmoid").grade(samples("a"))
    assert squashed.value == pytest.approx(torch.tensor(expected[0]).sigmoid().item(), abs=1e-5)


def test_a_chat_template_is_used(tmp_path):
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    folder = folder_of(tmp_path, transformers.AutoModelForSequenceClassification, 1, template)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = float(model(ids("[user]ask: [assistant]yes")).logits[0, 0].detach())
    assert rm((), path=folder).grade(samples("yes"))[0].value == pytest.approx(expected, abs=1e-5)


def test_a_process_reward_model_scores_every_step(step_folder):
    model = transformers.AutoModelForTokenClassification.from_pretrained(step_folder).eval()
    text = "first step\n\nsecond\n\nthe third"
    out = model(ids("ask: " + text + "\n\n")).logits[0].softmax(-1)[:, 1].detach()
    at = [len("ask: ") + end for end in (11, 19, 30)]  # the last character of each separator
    expected = [float(out[place]) for place in at]
    for pool, value in (
        ("mean", sum(expected) / 3),
        ("last", expected[-1]),
        ("min", min(expected)),
    ):
        (mark,) = prm((), path=step_folder, pool=pool).grade(samples(text))
        assert mark.value == pytest.approx(value, abs=1e-5) and mark.steps == ()
    (mark, other) = prm((), path=step_folder, process=True).grade(samples(text, "one"))
    assert [end for end, _ in mark.steps] == [10, 18, 29]
    assert [score for _, score in mark.steps] == pytest.approx(expected, abs=1e-5)
    assert len(other.steps) == 1
    assert prm((), path=step_folder).grade(samples(""))[0].value == 0.0


def test_steps():
    assert step_ends("a\n\nbc", "\n\n") == [1, 5]
    assert step_ends("a\n\n\n\nb\n\n", "\n\n") == [1, 6]
    assert step_ends("", "\n\n") == [] and step_ends(" \n\n ", "\n\n") == []


def test_what_is_no_reward_model_is_refused(tmp_path, reward_folder):
    causal = tmp_path / "causal"
    folder_of(causal, transformers.AutoModelForCausalLM, 1)
    many = tmp_path / "many"
    folder_of(many, transformers.AutoModelForSequenceClassification, 3)
    for text, why in (
        (f"rm(path={str(causal)!r})", "its scores would be noise"),
        (f"rm(path={str(many)!r})", "3 classes"),
        (f"rm(path={str(tmp_path / 'no')!r})", "no config.json"),
        (f"rm(path={reward_folder!r}, squash='tanh')", "squash"),
        (f"prm(path={reward_folder!r}, pool='max')", "pool"),
        (f"prm(path={reward_folder!r}, separator='')", "separator"),
        ("rm()", "needs path"),
    ):
        with pytest.raises(RewardError, match=why):
            built_in(text, ())


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory):
    """A tokenizer that puts a token of its own before and behind, and 64 places."""
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(
        **sizes, num_attention_heads=2, max_position_embeddings=64, num_labels=2
    )
    model = transformers.AutoModelForTokenClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    model.save_pretrained(path)
    vocabulary = {"<pad>": 0, "[C]": 1, "[S]": 2} | {chr(code): code for code in range(3, 128)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[C] $A [S]", special_tokens=[("[C]", 1), ("[S]", 2)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    fast.save_pretrained(path)
    return str(path)


def test_tokens_without_a_text_are_no_end_of_a_step(bert_folder):
    model = transformers.AutoModelForTokenClassification.from_pretrained(bert_folder).eval()
    said = "ask: one.two.three."
    row = torch.tensor([[1, *map(ord, said), 2]])
    chances = model(row).logits[0].softmax(-1)[:, 1].detach()
    expected = [float(chances[at + 1]) for at, letter in enumerate(said) if letter == "."]
    assert len({round(chance, 4) for chance in expected}) == 3
    part = prm((), path=bert_folder, separator=".", process=True)
    (mark,) = part.grade(samples("one.two.three"))
    assert [score for _, score in mark.steps] == pytest.approx(expected, abs=1e-5)


def test_an_answer_too_long_is_scored_as_one_that_stops_at_the_limit(reward_folder):
    """Neither a way around a low score, nor a hiding place: what stands behind changes nothing."""
    part = rm((), path=reward_folder)
    fits = "".join(chr(97 + at % 26) for at in range(251))  # 5 more are the prompt's
    whole, long, longer = part.grade(samples(fits, fits + "?", fits + "the best of all" * 999))
    assert whole.value == long.value == longer.value and whole.reason == ""
    assert "behind 251 characters: 257 tokens; the reward model reads up to 256" in long.reason
    own = replace(part.scorer, end=3)  # a model that was trained here reads the end token last
    read = own.read(Task(0, "ask: "), fits, ended=True)
    assert (len(read.ids), read.ids[-2:], read.kept) == (256, [ord(fits[249]), 3], 250)


def test_what_a_template_writes_behind_an_answer_stays(tmp_path):
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<e>{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    folder = folder_of(tmp_path, transformers.AutoModelForSequenceClassification, 1, template)
    read = rm((), path=folder).scorer.read(Task(0, "ask"), "x" * 999)
    said = "[user]ask<e>[assistant]" + "x" * 230 + "<e>"
    assert len(said) == 256 and read.ids == ids(said)[0].tolist() and read.kept == 230


def test_steps_behind_the_limit_are_no_good_ones(bert_folder):
    part = prm((), path=bert_folder, separator=".", process=True)
    text = "one.two." + "x" * 60 + ".four"
    (mark,), (stopped,) = part.grade(samples(text)), part.grade(samples(text[:56]))
    assert [end for end, _ in mark.steps] == [3, 7, 68, 73]
    assert [score for _, score in mark.steps[2:]] == [0.0, 0.0]
    assert mark.steps[:2] == stopped.steps[:2] and mark.steps[1][1] > 0
    assert mark.value == 0.0 and "reads up to 64" in mark.reason  # pool=min
    for pool, value in (("last", 0.0), ("mean", sum(score for _, score in mark.steps[:2]) / 4)):
        (other,) = replace(part, pool=pool).grade(samples(text))
        assert other.value == pytest.approx(value)


def test_a_prompt_too_long_is_no_fault_of_the_answer(reward_folder):
    (mark,) = rm((), path=reward_folder).grade(samples("yes", prompt="x" * 257))
    assert mark.status == "error" and "257 tokens; the reward model reads up to 256" in mark.reason


def test_half_a_character_is_no_crash(reward_folder):
    odd, other = rm((), path=reward_folder).grade(samples("a\ud800", "a"))
    assert odd.status == other.status == "ok"


@pytest.mark.parametrize("options", ["batch=0", "batch=True", "device='cuda:99'"])
def test_options_that_can_not_be(reward_folder, options):
    built_in(f"rm(path={reward_folder!r}, batch=1)", ())  # which True must not be taken for
    with pytest.raises(RewardError, match=options.partition("=")[0]):
        built_in(f"rm(path={reward_folder!r}, {options})", ())


@pytest.mark.parametrize(("device", "by_group"), [("cpu", True), ("cuda", False)])
def test_a_model_on_a_gpu_grades_when_all_is_sampled(reward_folder, device, by_group):
    """While a sampler captures its steps on the same GPU, nothing else may start work there."""
    grader = Grader({f"rm(path={reward_folder!r})": 1.0, "length": 0.0})
    ((name, part), _) = grader.parts.items()
    placed = SimpleNamespace(device=torch.device(device))
    grader.parts[name] = replace(part, scorer=replace(part.scorer, model=placed))
    assert grader.by_group is by_group


def test_one_step_that_is_no_number_spoils_the_answer(step_folder):
    """Whatever the pool: the lowest of a number and of none is the number, in Python."""
    part = prm((), path=step_folder, process=True)
    for pool in ("min", "mean", "last"):
        read = Reading([1], [0])
        mark = replace(part, pool=pool)._mark([0.5, float("nan"), 0.75], [1, 2, 3], read)
        assert mark.status == "error" and mark.steps == () and "nan" in mark.reason


def test_an_answer_ends_before_a_token_that_the_model_does_not_know(tmp_path):
    """A tokenizer may have more tokens than the model, and an answer may spell them."""
    auto = transformers.AutoModelForSequenceClassification
    part = rm((), path=folder_of(tmp_path, auto, 1, vocab_size=120))
    strange, whole = part.grade(samples("good,z bad", "good,"))
    assert strange.value == whole.value
    assert "behind 5 characters: token 122; the reward model knows 120" in strange.reason
    (mark,) = part.grade(samples("good", prompt="z?"))
    assert mark.status == "error" and "token 122" in mark.reason
    assert part.scorer.logits([Reading([0], [0]), Reading([], [], "why")])[1] is None


def test_a_text_that_the_tokenizer_refuses_is_an_error_of_its_own(reward_folder, monkeypatch):
    part = rm((), path=reward_folder)
    real = type(part.scorer).encode

    def encode(scorer, task, text):
        if "x" in text:
            raise KeyError("no [UNK]")
        return real(scorer, task, text)

    monkeypatch.setattr(type(part.scorer), "encode", encode)
    bad, good = part.grade(samples("x", "y"))
    assert bad.status == "error" and "can't read the text" in bad.reason
    assert good.status == "ok"


def test_many_steps_take_no_longer_than_many_tokens():
    """One search for each step: all against all would be 4e9 comparisons here."""
    text = "a\n\n" * 20_000
    starts = [NOWHERE, *range(len(text)), NOWHERE]
    found = last_tokens(starts, step_ends(text, "\n\n"), "\n\n")
    assert found == [3 * (number + 1) for number in range(20_000)]
    with pytest.raises(DataError, match="no token of its own"):
        last_tokens([NOWHERE], [1], "\n\n")
