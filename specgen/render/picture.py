"""A picture of a race: an animated SVG, in which both answers grow as fast as they were generated.

A viewer that cannot animate, or whose user prefers reduced motion, shows the whole answers.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from xml.sax.saxutils import escape

from specgen.measure.race import CONDITIONS, Race, RacedAnswer
from specgen.render.rows import Cell, Cleaner, Row, append_cells, clean_line, wrap

#: The width of a character, the height of a line, and the margin, in pixels. A character is about
#: as wide as in most fonts of the size in `_STYLE`.
_CHARACTER = 8.43
_LINE = 20
_MARGIN = 16
#: The width of an answer, and the space between the two, in characters.
_N_COLUMNS = 46
_GUTTER = 4
#: The number of spaces that a tab becomes.
_TAB = 4
#: How long the whole answers stay before the animation starts again, in seconds.
_REST_S = 4.0
#: Tokens have the colours that the pages have on dark screens.
_STYLE = """
text {
  font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  fill: #e6e6e3;
  white-space: pre
}
.faint { fill: #a3a29b }
.accepted { fill: #5fce86; text-decoration: underline }
.corrected { fill: #f58be3 }
.bonus { fill: #5bd2e6 }
.forced { fill: #9db8ff }
.verdict { font-weight: 700 }
@media (prefers-reduced-motion) { * { animation: none !important } }
"""


def race_picture(race: Race) -> str:
    """Return the SVG of a race that was not interrupted."""
    picture = _Picture()
    target = clean_line(race.answers[0].prompt.target)
    picture.write(f"{target}: a replay at true speed", "faint", 0, 0)

    # Both answers, side by side, with their figures below them.
    columns = [n * (_N_COLUMNS + _GUTTER) for n in range(len(race.answers))]
    layouts = [_laid_out(answer, picture) for answer in race.answers]
    first_line = 3
    figures_line = first_line + max(map(len, layouts))
    for answer, column, rows in zip(race.answers, columns, layouts, strict=True):
        title = clean_line(answer.title)[:_N_COLUMNS]
        picture.write(title, "faint", column, first_line - 1)
        for line, row in enumerate(rows, first_line):
            picture.write_row(row, column, line)
        appearance = picture.appearance(answer.seconds)
        picture.write(answer.length, f"faint {appearance}", column, figures_line)

    # The result, the colours, and how it was measured.
    end_s = max(answer.seconds for answer in race.answers)
    picture.write(race.verdict, f"verdict {picture.appearance(end_s)}", 0, figures_line + 2)
    column = 0
    for kind in race.kinds:
        picture.write(kind, kind, column, figures_line + 4)
        column += len(kind) + 2
    picture.write(CONDITIONS, "faint", 0, figures_line + 5)
    return picture.svg(figures_line + 6, end_s, race.verdict)


class _Picture:
    """Collects the texts of a picture, and when they appear."""

    def __init__(self) -> None:
        #: The texts as elements of the SVG.
        self._elements: list[str] = []
        #: The names of the animations, by the seconds after which their texts appear.
        self._appearances: dict[float, str] = {}

    def appearance(self, time_s: float) -> str:
        """Return the class of texts that appear at this time of the animation."""
        return self._appearances.setdefault(time_s, f"t{len(self._appearances)}")

    def write(
        self,
        text: str,
        classes: str,
        column: int,
        line: int,
        n_columns: int | None = None,
    ) -> None:
        """Add a text.

        Args:
            text: The text.
            classes: The names of its styles and of its appearance.
            column: Where it begins, in characters from the left margin.
            line: Its line, from 0.
            n_columns: Its width in characters; None: as many as it has.
        """
        x = _MARGIN + column * _CHARACTER
        y = _MARGIN + (line + 0.7) * _LINE  # of the baseline of its letters
        if n_columns is None:
            n_columns = len(text)
        self._elements.append(
            f'<text class="{classes}" x="{x:.1f}" y="{y:.0f}" '
            f'textLength="{n_columns * _CHARACTER:.1f}">{escape(text)}</text>'
        )

    def write_row(self, row: Row, column: int, line: int) -> None:
        """Add a row, whose marks are the classes of its texts; spaces are left out."""
        for mark, group in groupby(row.cells, attrgetter("mark")):
            cells = list(group)
            n_columns = sum(cell.width for cell in cells)
            text = "".join(cell.text for cell in cells)
            if text.strip():
                self.write(text, mark, column, line, n_columns)
            column += n_columns

    def svg(self, n_lines: int, end_s: float, title: str) -> str:
        """Return the picture.

        Args:
            n_lines: Its number of lines.
            end_s: When the last text appears.
            title: What it shows, for those who cannot see it.
        """
        width = round(2 * _MARGIN + (2 * _N_COLUMNS + _GUTTER) * _CHARACTER)
        height = 2 * _MARGIN + n_lines * _LINE
        whole_s = end_s + _REST_S
        animations = []
        for time_s, name in self._appearances.items():
            percent = 100 * time_s / whole_s
            animations.append(
                f"@keyframes {name}"
                f"{{0%,{percent:.2f}%{{opacity:0}}{percent + 0.01:.2f}%,to{{opacity:1}}}}"
                f".{name}{{animation:{name} {whole_s:.2f}s infinite}}"
            )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}{''.join(animations)}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1a1a19"/>',
            *self._elements,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _laid_out(answer: RacedAnswer, picture: _Picture) -> list[Row]:
    """Return the rows of an answer, in which a token's mark is its kind and its appearance."""
    rows: list[Row] = []
    cells: list[Cell] = []  # of the present line
    cleaner = Cleaner()
    for event in answer.rounds:
        appearance = picture.appearance(event.time_s)
        for piece in event.pieces:
            text = cleaner.feed(piece.text).replace("\t", " " * _TAB)
            first, *others = text.split("\n")
            append_cells(cells, first, f"{piece.kind} {appearance}")
            for part in others:
                rows += wrap(cells, _N_COLUMNS, between_words=True)
                cells = []
                append_cells(cells, part, f"{piece.kind} {appearance}")
    return [*rows, *wrap(cells, _N_COLUMNS, between_words=True)]
