"""What keeps a page from being read by everybody, anywhere: a list of problems, each in words.

Checked is what a parser can tell: language, title, headings, alternative text, table headers, the contrast of
text (WCAG 2.1, 1.4.3: 4.5 to 1) in both themes from the CSS, anything that would be fetched, dead placeholders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import tinycss2
import tinycss2.color3
from bs4 import BeautifulSoup, Tag

LEAST_CONTRAST = 4.5
MOST_BYTES = 3_000_000
FETCHED = {
    "src",
    "srcset",
    "poster",
    "data",
    "background",
    "action",
    "formaction",
    "xlink:href",
    "ping",
    "manifest",
}
MEANINGLESS = re.compile(
    r"^(image|figure|picture|plot|graph|img|no description.*|output.*|<figure.*|[\w-]+\.png)?$", re.I
)
PLACEHOLDER = re.compile(r"widget-view|<Figure size|\b(VBox|HBox|Output|interactive|IntSlider)\(.*\)|model_id")
Colour = tuple[float, float, float, float]  # red, green, blue, opacity, from 0 to 1


def problems(page: str) -> list[str]:
    """Everything that is wrong with a page; an empty list where nothing is."""
    soup = BeautifulSoup(page, "html.parser")
    found = [*structure(soup), *images(soup), *tables(soup), *external(soup), *contrast(soup)]
    found += [f"a dead placeholder: {m.group()[:60]!r}" for m in PLACEHOLDER.finditer(visible(soup))]
    size = len(page.encode())
    return found + ([f"the page has {size / 1e6:.1f} MB, more than 3"] if size > MOST_BYTES else [])


def visible(soup: BeautifulSoup) -> str:
    """The text of a page outside of code."""
    return " ".join(
        text for text in soup.find_all(string=True) if not text.find_parent(["style", "code", "details"])
    )


def structure(soup: BeautifulSoup) -> Iterator[str]:
    """Language, title, one h1, and no level left out."""
    root = soup.find("html")
    if not (isinstance(root, Tag) and root.get("lang")):
        yield "no lang attribute"
    if not (soup.title and soup.title.get_text(strip=True)):
        yield "no title"
    headings = soup.find_all(re.compile(r"^h[1-6]$"))
    levels = [int(heading.name[1]) for heading in headings]
    if levels.count(1) != 1:
        yield f"{levels.count(1)} headings of level 1"
    for before, after, heading in zip([0, *levels], levels, headings, strict=False):
        if after > before + 1:
            yield f"heading {heading.get_text(strip=True)[:40]!r} jumps from level {before} to {after}"
        if not heading.get_text(strip=True):
            yield "an empty heading"


def images(soup: BeautifulSoup) -> Iterator[str]:
    """Alternative text that says something."""
    for image in soup.find_all("img"):
        alt = str(image.get("alt", "")).strip()
        if MEANINGLESS.match(alt):
            yield f"an image with alt={alt!r}"


def tables(soup: BeautifulSoup) -> Iterator[str]:
    """Headers that say what they head."""
    for table in soup.find_all("table"):
        headers = table.find_all("th")
        if not headers:
            yield f"a table without headers: {table.get_text(' ', strip=True)[:40]!r}"
        for header in headers:
            if header.get("scope") not in {"col", "row", "colgroup", "rowgroup"}:
                yield f"table header {header.get_text(strip=True)[:30]!r} has no scope"


def external(soup: BeautifulSoup) -> Iterator[str]:
    """Whatever a browser would fetch, run, or be sent to without a click."""
    for tag in soup.find_all(True):
        if tag.name in {"script", "iframe", "object", "embed", "base", "frame", "applet"}:
            yield f"a {tag.name} element"
        for name, value in tag.attrs.items():
            text = (" ".join(value) if isinstance(value, list) else str(value)).strip()
            href = name == "href" and tag.name != "a"
            if (name in FETCHED or href) and text and not text.startswith(("data:", "#")):
                yield f"{tag.name} {name}={text[:60]!r} would be fetched"
            if name.startswith("on") or text.lower().startswith(("javascript:", "vbscript:")):
                yield f"{tag.name} {name} is a script"
            if name == "style" and "url(" in text:
                yield from fetched_by_css(text)
        if tag.name == "style":
            yield from fetched_by_css(tag.get_text())


def fetched_by_css(text: str) -> Iterator[str]:
    """Addresses and imports of a style."""
    for match in re.finditer(r"@import[^;]*|url\(\s*[\"']?(?!data:|#)[^)]*\)", text):
        yield f"CSS would fetch {match.group()[:60]!r}"


def contrast(soup: BeautifulSoup) -> Iterator[str]:
    """Text and background of every rule that sets either, in the light and the dark theme.

    Where a rule sets one of them, the other is the body's: its ink, or each of its papers (--paper and --soft).
    """
    sheets = [rule for style in soup.find_all("style") for rule in rules(style.get_text(), "all")]
    inline = [("all", f"{tag.name} style", declarations(str(tag["style"]))) for tag in soup.find_all(style=True)]
    for theme in ("light", "dark"):
        mine = [rule for rule in sheets if rule[0] in ("all", theme)]
        variables = {n: v for _, selector, d in mine if ":root" in selector for n, v in d.items() if n[:2] == "--"}
        if "--ink" not in variables or "--paper" not in variables:
            yield f"no colours for the {theme} theme"
            continue
        for _, selector, told in [*mine, *inline]:
            for text, paper, ratio in ratios(told, variables):
                if ratio < LEAST_CONTRAST:
                    yield f"{theme}: {selector} has contrast {ratio:.2f} ({text} on {paper})"


def ratios(told: dict[str, str], variables: dict[str, str]) -> Iterator[tuple[str, str, float]]:
    """(text, background, contrast) of what a rule sets."""
    paper = told.get("background-color") or told.get("background")
    text = told.get("color")
    if not (text or paper or "opacity" in told) or (paper and not colour(paper, variables)):
        return
    opacity = float(told["opacity"]) if re.fullmatch(r"[\d.]+", told.get("opacity", "")) else 1.0
    for behind in [paper] if paper else ["var(--paper)", "var(--soft)"]:
        front, back = colour(text or "var(--ink)", variables), colour(behind, variables)
        if front and back:
            base = over(back, colour("var(--paper)", variables) or (1, 1, 1, 1))
            shown = over((*front[:3], front[3] * opacity), base)
            yield text or "var(--ink)", behind, ratio_of(shown, base)


def rules(sheet: str, theme: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """(theme, selector, declarations) of a stylesheet; a theme's own rules come after those of all."""
    for rule in tinycss2.parse_stylesheet(sheet, skip_comments=True, skip_whitespace=True):
        if rule.type == "qualified-rule":
            yield theme, tinycss2.serialize(rule.prelude).strip(), declarations(tinycss2.serialize(rule.content))
        elif rule.type == "at-rule" and rule.at_keyword == "media" and rule.content:
            condition = tinycss2.serialize(rule.prelude)
            inner = next((t for t in ("dark", "light") if f"prefers-color-scheme: {t}" in condition), "")
            if inner:
                yield from rules(tinycss2.serialize(rule.content), inner)


def declarations(text: str) -> dict[str, str]:
    """name: value of a block."""
    found = tinycss2.parse_declaration_list(text, skip_comments=True, skip_whitespace=True)
    return {d.name: tinycss2.serialize(d.value).strip() for d in found if d.type == "declaration"}


def colour(value: str, variables: dict[str, str]) -> Colour | None:
    """A CSS colour, variables followed; None where it is none (inherit, transparent)."""
    match = re.fullmatch(r"var\((--[\w-]+)\)", value.strip())
    if match:
        return colour(variables[match.group(1)], variables) if match.group(1) in variables else None
    found = tinycss2.color3.parse_color(value)
    if found is None or found == "currentColor" or found.alpha == 0:
        return None
    return found.red, found.green, found.blue, found.alpha


def over(front: Colour, back: Colour) -> Colour:
    """A colour with opacity over an opaque one."""
    alpha = front[3]
    red, green, blue = (f * alpha + b * (1 - alpha) for f, b in zip(front[:3], back[:3], strict=True))
    return red, green, blue, 1.0


def ratio_of(one: Colour, other: Colour) -> float:
    """Contrast of two opaque colours, 1 to 21 (WCAG 2.1, contrast ratio)."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(shade: Colour) -> float:
    """Relative luminance (WCAG 2.1)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shade[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
