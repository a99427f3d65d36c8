"""How the page of a benchmark looks."""

from __future__ import annotations

#: Colours by which contenders are told apart, before they come again.
N_COLOURS = 8
#: Light and dark: they keep their hues, and their distances from each other and the paper.
_LIGHT = ("#2a78d6", "#eb6834", "#1baf7a", "#4a3aa7", "#eda100", "#e87ba4", "#008300", "#e34948")
_DARK = ("#3987e5", "#d95926", "#199e70", "#9085e9", "#c98500", "#d55181", "#008300", "#e66767")
_LIGHT_INK = "--paper:#fcfcfb;--ink:#0b0b0b;--faint:#52514e;--line:#dcdad4;--plain:#8a8983"
_DARK_INK = "--paper:#1a1a19;--ink:#f5f5f3;--faint:#c3c2b7;--line:#3d3c39;--plain:#8f8e88"


def _colours(ink: str, colours: tuple[str, ...]) -> str:
    return ";".join([ink, *(f"--c{number}:{colour}" for number, colour in enumerate(colours))])


_CLASSES = "".join(
    f".{name}{{--own:var(--{colour})}}"
    for name, colour in (
        *((f"c{number}", f"c{number}") for number in range(N_COLOURS)),
        ("plain", "plain"),
        ("target", "c0"),
        ("draft", "c1"),
        ("own", "plain"),
    )
)

STYLE = f"""
:root{{color-scheme:light dark;{_colours(_LIGHT_INK, _LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_colours(_DARK_INK, _DARK)}}}}}
{_CLASSES}
body{{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}}
main{{max-width:60rem;margin:0 auto;padding:1.5rem}}
h1{{font-size:1.5rem}} h2{{font-size:1.15rem;margin:2.5rem 0 .5rem}}
.note,.notice,figcaption{{color:var(--faint)}} .notice{{font-weight:600}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th,td{{padding:.25rem .75rem .25rem 0;text-align:right;vertical-align:top}}
th{{color:var(--faint);font-weight:500}}
tr>*:first-child{{text-align:left;overflow-wrap:anywhere;min-width:10rem}}
.about td,.failures td,.failures th{{text-align:left;overflow-wrap:anywhere}}
tbody tr{{border-top:1px solid var(--line)}}
figure{{margin:1.5rem 0}} svg{{width:100%;height:auto;font:12px system-ui,sans-serif}}
.legend{{display:flex;flex-wrap:wrap;gap:.25rem 1rem;margin:.25rem 0}}
.swatch{{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em;\
background:var(--own)}}
text{{fill:var(--ink)}} .label,.value{{text-anchor:end}}
.tick{{text-anchor:middle;fill:var(--faint)}} text.note{{fill:var(--faint)}}
.heading{{font-weight:600}}
.fill{{fill:var(--own)}} .line{{fill:none;stroke:var(--own);stroke-width:2}}
.part,circle{{stroke:var(--paper);stroke-width:1.5}}
.whisker{{fill:none;stroke:var(--ink);stroke-width:1.25}}
.grid{{stroke:var(--line)}} .reference{{stroke:var(--faint);stroke-dasharray:4 3}}
"""
