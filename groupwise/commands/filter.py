"""`groupwise filter`: the rows that are worth training on, and a report of what was removed."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from groupwise.commands.shared import (
    SETTINGS,
    aligned,
    check_one_turn,
    config_of,
    print_json,
    read_config,
    read_placed,
    say,
    split_models,
    start_pytorch,
    words_of,
)
from groupwise.common.progress import phase
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.data.files import FileRow
    from groupwise.evaluate.request import Basis
    from groupwise.probing.row_filter import Band, FilterResult

BAND, SAMPLES, TEMPERATURE = "0.1,0.9", 8, 1.0
SUFFIXES = (".jsonl", ".jsonl.gz")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "filter",
        help="training rows without copies, evaluation items, guesses, too easy and too hard ones",
        usage="groupwise filter DATA [CONFIG.toml] [KEY=VALUE ...] --out FILE.jsonl [--dedup] "
        "[--against SETS [--data DIR] [--ngram N]] [--guessable [--chance X]] "
        "[--model MODEL [--band LOW,HIGH] [--samples N] [--temperature X]] [--json]",
        example="groupwise filter train.jsonl --dedup --out clean.jsonl",
    )
    parser.add_argument("path", metavar="DATA", help="a file, a pattern, gsm8k:FILE, hub:ORG/NAME")
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument("--out", required=True, metavar="FILE", help=".jsonl or .jsonl.gz")
    parser.add_argument("--dedup", action="store_true", help="rows that (nearly) repeat go")
    parser.add_argument(
        "--against", action="append", default=[], metavar="SETS",
        help="rows of these evaluation sets go: suites or files, as in `eval --suite`",
    )  # fmt: skip
    parser.add_argument("--data", metavar="DIR", help="has NAME/test.* of suites; default: the hub")
    parser.add_argument("--ngram", type=int, metavar="N", help="words in a row; default: 13")
    parser.add_argument("--guessable", action="store_true", help="rows go that a blind guess gets")
    parser.add_argument("--chance", type=float, metavar="X", help="of a guess; default: 0.05")
    parser.add_argument("--model", metavar="MODEL", help="rows go that it always or never gets")
    parser.add_argument("--band", metavar="LOW,HIGH", help=f"of pass rates; default: {BAND}")
    parser.add_argument("--samples", type=int, metavar="N", help=f"a row; default: {SAMPLES}")
    parser.add_argument("--temperature", type=float, metavar="X", help=f"default: {TEMPERATURE:g}")
    parser.add_argument("--json", action="store_true", help="the report as data")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    start_pytorch()
    from groupwise.data.guessing import CHANCE
    from groupwise.data.overlap import NGRAM
    from groupwise.evaluate.request import Basis
    from groupwise.probing import row_filter as sieving

    paths, source, overrides = split_models(args.path, args.items)
    if len(paths) > 1:
        raise ConfigError(f"{paths[1]}: one DATA at a time. Several files go as a pattern, a/*.")
    check_options(args)
    out = Outputs(Path(args.out), bool(args.model))
    own = source or (config_of(Path(args.model)) if args.model else None)
    config = read_placed(own, overrides, args.model) if args.model else read_config(own, overrides)
    check_one_turn(config, "filter")
    given = tuple(item.partition("=")[0].strip() for item in overrides)
    wanted = sieving.FilterRequest(
        dedup=args.dedup,
        against=words_of(",".join(args.against)),
        ngram=NGRAM if args.ngram is None else args.ngram,
        chance=(CHANCE if args.chance is None else args.chance) if args.guessable else None,
        folder=Path(args.data) if args.data else None,
    )
    sieving.check(args.path, wanted)
    looked = PassRates(args, Basis(config, own is not None, given)) if args.model else None
    with out.held():
        with phase("looking at", things="rows") as told:
            found = sieving.filter_rows(data_of(args.path, config), wanted, told)
        band = looked.band(found, out.rates) if looked else None
        sieving.add_prompts(found)
        report = report_of(found, args, band)
        write(out, found, report)
    if args.json:
        print_json(report)
    else:
        print(text(found, report, band))
    print(f"wrote {out.rows}, {out.removed.name} and {out.report.name}", file=sys.stderr)
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that nothing would use, and a filter that filters nothing."""
    for option, needs in (
        ("data", "against"), ("ngram", "against"), ("chance", "guessable"), ("band", "model"),
        ("samples", "model"), ("temperature", "model"),
    ):  # fmt: skip
        if getattr(args, option) is not None and not getattr(args, needs):
            raise ConfigError(f"--{option} belongs to --{needs}: without it, it has no effect.")
    if not (args.dedup or args.against or args.guessable or args.model):
        raise ConfigError(
            "Nothing is asked for: every row would stay. Add --dedup, --against SETS, --guessable "
            "or --model MODEL."
        )


def data_of(name: str, config: Config) -> Any:
    from groupwise.config.fields import Data
    from groupwise.data.named_sets import SETS

    if name.partition(":")[0] in SETS:
        return Data(train=name)
    return Data(train=name, prompt_key=config.data.prompt_key, answer_key=config.data.answer_key)


class PassRates:
    """The rows of a file with their pass rates under a model."""

    def __init__(self, args: argparse.Namespace, basis: Basis) -> None:
        from groupwise.evaluate.request import EvalRequest, candidates, check
        from groupwise.probing import pass_rates

        self.name, self.basis = args.path, basis
        ends = words_of(args.band or BAND)
        try:
            low, high = (float(each) for each in ends)
        except ValueError:
            raise ConfigError(f"--band {args.band}: write two shares, 0.1,0.9.") from None
        self.limits = (low, high)
        self.asked = EvalRequest(
            samples=SAMPLES if args.samples is None else args.samples,
            temperature=TEMPERATURE if args.temperature is None else args.temperature,
        )
        pass_rates.check(self.asked, self.limits)
        check(self.asked, basis.config)
        [self.candidate] = candidates([args.model])

    def band(self, found: FilterResult, kept: Path) -> Band:
        from groupwise.probing import pass_rates, row_filter

        entry = pass_rates.open_rows(self.name, self.basis, found.removed)
        counts = pass_rates.rates(entry, self.candidate, self.basis, self.asked, kept, say)
        low, high = self.limits
        band = row_filter.Band(low, high, self.asked.samples, self.candidate.name, 0.0, 0.0, {})
        return row_filter.by_band(found, counts, band)


# --- files ------------------------------------------------------------------------------------


class Outputs:
    """The files that are written; none replaces another."""

    def __init__(self, rows: Path, sampled: bool) -> None:
        suffix = next((x for x in SUFFIXES if rows.name.endswith(x)), None)
        if suffix is None:
            raise ConfigError(f"--out {rows}: rows are written as {' or '.join(SUFFIXES)}.")
        stem = rows.name.removesuffix(suffix)
        self.rows = rows
        self.removed = rows.with_name(f"{stem}.removed.jsonl")
        self.report = rows.with_name(f"{stem}.report.json")
        self.rates = rows.with_name(f"{stem}.rates.jsonl")
        self.fresh = (self.rows, self.removed, self.report, *([] if sampled else [self.rates]))
        if not rows.parent.is_dir():
            raise ConfigError(f"--out {rows}: there is no folder {rows.parent}.")
        self.check()

    def check(self) -> None:
        """Refuse what is there; tidy up what a command that was killed left of it."""
        from groupwise.runfiles.whole import remove_unfinished

        for file in self.fresh:
            remove_unfinished(file.parent, file.name)
            if file.exists():
                raise ConfigError(
                    f"{file} exists already, and nothing is overwritten. Choose another --out."
                )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold them against other processes."""
        from groupwise.runfiles.whole import only_writer

        with only_writer(self.rows):
            self.check()  # another may have made them a moment ago
            yield


def write(out: Outputs, found: FilterResult, report: dict[str, Any]) -> None:
    from groupwise.runfiles.files import to_line, to_page, write_atomic
    from groupwise.runfiles.whole import whole_file

    try:
        with whole_file(out.rows) as whole, _packed(out.rows, whole) as file:
            for row in found.kept():
                file.write(f"{as_line(row)}\n".encode())
        with whole_file(out.removed) as file:
            for number in sorted(found.removed):
                file.write(f"{to_line(asdict(found.removed[number]))}\n".encode())
        write_atomic(out.report, to_page(report))
    except OSError as error:
        raise ConfigError(f"{out.rows} can't be written: {error}. Choose another --out.") from None


def _packed(path: Path, whole: BinaryIO) -> AbstractContextManager[BinaryIO]:
    """Return the file as it is, or what packs into it."""
    return gzip.open(whole, "wb") if path.suffix == ".gz" else nullcontext(whole)  # type: ignore


def as_line(row: FileRow) -> str:
    """Return a line of JSON as it is in the file; a row of a table as JSON."""
    if row.text:
        return row.text
    line = json.dumps(row.values, ensure_ascii=False, default=str)
    return line.encode(errors="backslashreplace").decode()  # half a surrogate pair, as JSON has it


# --- for people -------------------------------------------------------------------------------


def report_of(found: FilterResult, args: argparse.Namespace, band: Band | None) -> dict[str, Any]:
    asked = ("dedup", "against", "ngram", "guessable", "chance", "model", "band", "samples")
    return {
        "format": 1,
        "kind": "groupwise filter",
        "data": found.name,
        "asked": {name: getattr(args, name) for name in asked if getattr(args, name)},
        "rows": found.total,
        "kept": found.total - len(found.removed),
        "removed": found.counts(),
        "evaluation_items": found.items,
        "variants_kept": found.variants,
        "repeated_with_another_answer": found.conflicts,
        "band": band and asdict(band),
        "examples": found.examples(),
        "notes": found.notes,
    }


def text(found: FilterResult, report: dict[str, Any], band: Band | None) -> str:
    kept = report["kept"]
    lines = [f"{found.name}: {kept:,} of {found.total:,} rows stay ({kept / found.total:.1%})", ""]
    if report["removed"]:
        rows = [["removed", "rows", "share"]]
        for reason, number in report["removed"].items():
            rows.append([reason, f"{number:,}", f"{number / found.total:.2%}"])
        lines += aligned(rows)
    for reason, examples in report["examples"].items():
        first = examples[0]
        lines += ["", f"{reason}: row {first['row']}, {first['why']}", f"  {first['prompt']}"]
        lines += [f"  {first['other']}"] if first["other"] else []
    notes = []
    if found.variants:
        notes.append(
            f"Rows that are an evaluation item but for its numbers: {found.variants:,}. They stay."
        )
    if found.conflicts:
        notes.append(f"{found.conflicts:,} repeated prompts have another answer than before.")
    if band is not None:
        notes += [
            "rows by right samples: "
            + ", ".join(f"{name}: {number:,}" for name, number in band.histogram.items()),
            f"band {band.low:g} to {band.high:g} from {band.samples} samples: of the rows that "
            f"stay about {band.inside_kept / max(kept, 1):.0%} are in it, and about "
            f"{band.inside_removed:,.0f} of those that went.",
        ]
    return "\n".join([*lines, *([""] if notes else []), *notes])
