"""A clue: what a line looks like, and what it means. The families are tables of these; explain.py asks them."""

from dataclasses import dataclass

from holdfast.diagnose.finding import Confidence

# Python tracebacks through torch are long: a clue may look this many lines up or down for its surroundings.
AROUND = 45


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """One kind of line.

    `pattern` is searched anywhere in a line; its named groups may be used in `says` and
    `advice`. `above` and `below` must be found
    in the lines around it, when given. Clues of a family stand from the most to the least specific: the first that
    fits takes the line. `supports` marks a line that means something only beside another of the same finding.
    """

    name: str
    pattern: str
    says: str
    advice: str
    confidence: Confidence = "certain"
    above: str = ""
    below: str = ""
    supports: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The clues of one kind of log. `kind` is what to call it when nothing was found."""

    kind: str
    clues: tuple[Clue, ...]
