"""Check that any input gets the right answer or a one-line error.

    python -m tests.long_runs.fuzz --cases 3000 --seed 1

Runs specgen on damaged files, odd texts, options and environments
(`tests/long_runs/fuzz_cases.py`), each in a separate process with limits on time and memory. A case
passes with exit code 0 and the right answer, or with a documented exit code and one line that
begins with ``error:``. Anything else is a finding: it is printed, its folder is kept under
`--keep`, and the exit code is 1. The result is JSON: how often the cases of each kind ended with
which exit code, and the findings.

A seed always gives the same cases, which are numbered. `--only NUMBER` repeats one. After
Ctrl-C, it prints the options that resume the run.
"""

from __future__ import annotations

import argparse
import collections
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.long_runs.forked import Outcome, run_forked
from tests.long_runs.fuzz_cases import (
    CLOSED,
    MAKERS,
    Base,
    Case,
    make_base,
    make_case,
    repeated,
    variables,
)

#: Lines that no user should see.
_FORBIDDEN = ("Traceback", "GGML_ASSERT", "Exception ignored", "Warning:", "core dumped")


def verdict(case: Case, outcome: Outcome, base: Base, folder: Path) -> str | None:
    """What is wrong with how a case ended; None if nothing is."""
    code, err = outcome.code, outcome.err
    if code is None:
        return f"it took more than {case.limit_s:g} s"
    if code < 0:
        return f"signal {-code}"
    if "No such option" in err:
        return "the case has an option that was renamed or removed"
    for word in _FORBIDDEN:
        if word in err:
            return f"{word!r} on standard error"
    if code not in case.codes and code != 0:
        return f"exit code {code}"
    n_errors = sum(line.startswith("error: ") for line in err.splitlines())
    if n_errors != int(code != 0) and not (case.asks_several and code and n_errors):
        return f"exit code {code} with {n_errors} lines of error"
    if code:
        return None
    if case.text is not None and outcome.out != case.text:
        return f"{outcome.out!r} is not {case.text!r}"
    if case.same_as is not None:
        plain = run_forked(case.same_as, folder, variables(folder), stdin=case.stdin)
        if (plain.code, plain.out) != (code, outcome.out):
            said = f"{plain.out!r} ({plain.code})"
            return f"{outcome.out!r} is not {said}, which it is without drafts"
    return None


def run_cases(
    numbers: Sequence[int], seed: int, kinds: Sequence[str], keep: Path | None
) -> Iterator[tuple[int, str, int | None, str | None]]:
    """Number, kind, exit code and finding of each case."""
    # Not a TemporaryDirectory: forks would remove it at their end.
    scratch = Path(tempfile.mkdtemp())
    try:
        base = make_base(scratch / "base")
        for number in numbers:
            folder = scratch / str(number)
            folder.mkdir()
            name, case = make_case(number, seed, base, folder, kinds)
            environment = {**variables(folder), **case.environment}
            outcome = run_forked(
                case.arguments, folder, environment, stdin=case.stdin, limit_s=case.limit_s
            )
            found = verdict(case, outcome, base, folder)
            if (folder / CLOSED).exists():
                (folder / CLOSED).chmod(0o700)
            if found is not None and keep is not None:
                kept = keep / f"{seed}-{number}-{name}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(folder, kept, ignore_dangling_symlinks=True)
                command = f"specgen {shlex.join(case.arguments)}\n{found}\n"
                (kept / "command.txt").write_text(command, errors="backslashreplace")
            yield number, name, outcome.code, found
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(scratch)


def main() -> int:
    """Run cases, and report what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (default: 0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case alone")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other cases")
    parser.add_argument(
        "--kind", action="append", choices=[*MAKERS], help="cases of this kind (default: all)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("build/fuzz"),
        help="the folder for the files of findings (default: build/fuzz)",
    )
    asked = parser.parse_args()
    numbers = range(asked.first, asked.first + asked.cases)
    if asked.only is not None:
        numbers = range(asked.only, asked.only + 1)
    codes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    findings: list[str] = []
    following = numbers.start
    try:
        for number, name, code, found in run_cases(
            numbers, asked.seed, repeated(asked.kind or MAKERS), asked.keep
        ):
            codes[name]["finding" if found else str(code)] += 1
            if found is not None:
                findings.append(f"{number} {name}: {found}")
                print(f"finding: {findings[-1][:600]}", file=sys.stderr, flush=True)
            following = number + 1
            if following % 100 == 0:
                print(f"{following} done", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        rest = f"--first {following} --cases {numbers.stop - following}"
        print(f"interrupted; resume with {rest}", file=sys.stderr, flush=True)
    print(json.dumps({"seed": asked.seed, "codes": codes, "findings": findings}, indent=1))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
