"""The formatter: it keeps every token and comment, and a second run changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cli import main
from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.source import Source
from schedc.syntax.formatter import format_source
from schedc.syntax.parser import parse
from support.paths import ROOT
from support.sweeps import swept

LIBRARY = sorted((ROOT / "schedules").glob("*.sched"))

MESSY = """\
# a head
sched 1
##   Kept as it is.
schedule messy ( P:ranks=4 ,M : microbatches = 8,) {


  require P>=1,M >= 1   # why
      place   map( 2*P ){stage s on rank s%P}
  fn f(k)=k//P   fn twice(k) = -k+ 2* k
  let unused=min(P ,M) if P>2 else not P
rank r { let w = r let v = -r
    # inside
    phase warm repeat w{F0 F [ 1 ]}
    phase steady_state for k in 0..<M - w { F0@k   F1&B0 }  # a
    phase x { W }   # b
    repeat 2 { W
      W0 } F0
    if r==0 { F0 }
    else { B0
    }

  }
  expect bubble==(P - 1)*(F +B) when F==I
    and I == W
  expect makespan>=1 when M>1
}
# the end"""

TIDY = """\
# a head
sched 1
##   Kept as it is.
schedule messy(P: ranks = 4, M: microbatches = 8,) {
  require P >= 1, M >= 1   # why
  place map(2*P) { stage s on rank s%P }
  fn f(k) = k//P   fn twice(k) = -k + 2 * k
  let unused = min(P, M) if P > 2 else not P
  rank r {
    let w = r   let v = -r
    # inside
    phase warm         repeat w              { F0  F[1] }
    phase steady_state for k in 0 ..< M - w  { F0 @ k  F1 & B0 }   # a
    phase x            { W }                                       # b
    repeat 2 {
      W
      W0
    }
    F0
    if r == 0 { F0 } else {
      B0
    }
  }
  expect bubble == (P - 1)*(F + B)  when F == I
    and I == W
  expect makespan >= 1  when M > 1
}
# the end
"""


def formatted(text: str) -> str:
    return format_source(Source("test.sched", text))


def test_the_layout() -> None:
    assert formatted(MESSY) == TIDY
    assert formatted(TIDY) == TIDY


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_the_library_is_formatted(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert formatted(text) == text


def words(text: str) -> list[str]:
    """The text cut at its white space, comments whole."""
    return re.findall(r"#[^\n]*|[^\s#]+", text)


@st.composite
def respaced(draw: st.DrawFn) -> str:
    """A library file with other white space between its words: blanks, tabs, line ends, and comments."""
    text = draw(st.sampled_from(LIBRARY)).read_text(encoding="utf-8")
    choose = draw(st.randoms(use_true_random=False))
    gaps = [" ", "  ", "\t", "\n", "\r\n", "\n\n\n    ", " # why\n", "\n  # on its own\n"]
    found = []
    for word in words(text):
        found.append(word)
        found.append("\n" if word.startswith("#") else choose.choice(gaps) if choose.random() < 0.3 else " ")
    return "".join(found)


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(60, 25))
@given(respaced())
def test_any_white_space_is_formatted_once_and_keeps_its_meaning(text: str) -> None:
    once = formatted(text)
    assert formatted(once) == once
    assert [w.rstrip() for w in words(once) if w[0] == "#"] == [w.rstrip() for w in words(text) if w[0] == "#"]
    assert re.sub(r"#[^\n]*|\s", "", once) == re.sub(r"#[^\n]*|\s", "", text)
    assert "\t" not in once
    assert not re.search(r" \n|\n\n\n|\{\n\n|\r", once)
    (before,), (after,) = (parse(Source("t", t)).schedules for t in (text, once))
    one, other = (elaborate(tree, {}) for tree in (before, after))
    for column in ("kind", "stage", "microbatch", "pair", "rank_start"):
        assert (getattr(one, column) == getattr(other, column)).all()


NAMES = st.sampled_from(["a", "k", "P", "M"])
VALUES: st.SearchStrategy[str] = st.recursive(
    NAMES | st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.builds("({})".format, inner),
        st.builds("{}{}{}".format, inner, st.sampled_from(["+", " -", "* ", "//", " % "]), inner),
        st.builds("-{}".format, NAMES),
        st.builds("min({},{})".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("({}<={} and not({}))".format, inner, inner, inner),
    ),
    max_leaves=6,
)
STATEMENTS: st.SearchStrategy[str] = st.recursive(
    st.one_of(
        st.sampled_from(["F", "B0", "W", "I[1]", "F0&B1", "F@3"]),
        st.builds("let a={}".format, VALUES),
        st.builds("F[{}] @ {}".format, VALUES, VALUES),
    ),
    lambda inner: st.one_of(
        st.builds("repeat {}{{{}}}".format, VALUES.map(" {}".format), inner),
        st.builds("phase x repeat {} {{\n{}\n}}".format, VALUES, inner),
        st.builds("phase longer_name {{{}}}".format, inner),
        st.builds("for k in 0 ..< {} {{{}}}".format, VALUES, inner),
        st.builds("if {} {{{}}} else {{{}\n}}".format, VALUES, inner, inner),
        st.builds("{} # {}\n{}".format, inner, NAMES, inner),
        st.builds("{}\n{}".format, inner, inner),
        st.builds("{} {}".format, inner, inner),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(150, 60))
@given(STATEMENTS)
def test_random_programs_keep_their_tokens(body: str) -> None:
    text = f"schedule s(P: ranks, M: microbatches) {{ rank r {{ {body} }} }}"
    once = formatted(text)
    assert formatted(once) == once
    assert re.sub(r"\s", "", once) == re.sub(r"\s", "", text)


def test_what_does_not_parse_is_not_formatted(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.sched", tmp_path / "bad.sched"
    good.write_bytes(MESSY.replace("\n", "\r\n").encode())
    bad.write_text("sched 1\nschedule x( {\n")
    result = CliRunner().invoke(main, ["fmt", str(tmp_path)])
    assert result.exit_code == 1
    assert "bad.sched:2:" in result.stderr
    assert good.read_bytes() == TIDY.encode()
    assert bad.read_text() == "sched 1\nschedule x( {\n"
    with pytest.raises(DiagnosticError):
        formatted("schedule")


def test_check_shows_the_difference_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "messy.sched"
    path.write_text(MESSY)
    result = CliRunner().invoke(main, ["fmt", "--check", str(path)])
    assert result.exit_code == 1
    assert "-    repeat 2 { W" in result.stdout
    assert path.read_text() == MESSY
    path.write_text(TIDY)
    assert CliRunner().invoke(main, ["fmt", "--check", str(path)]).exit_code == 0
    result = CliRunner().invoke(main, ["fmt", "-"], input=MESSY)
    assert result.stdout == TIDY
