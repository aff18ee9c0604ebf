"""Which plain words a pattern cannot match without. Finding a word in a large log is much faster than a pattern."""

# Shorter words stand in too many lines to spare any work.
SHORTEST = 3


def words(pattern: str) -> tuple[str, ...]:
    """One word for each alternative of the pattern: a line without any of them does not match.

    Only the outermost level is read: what stands in groups and classes is left out, which is always safe.
    """
    found = tuple(max(_runs(alternative), key=len, default="") for alternative in _alternatives(_tokens(pattern)))
    if any(len(word) < SHORTEST for word in found):
        raise ValueError(f"an alternative has no plain word of {SHORTEST} letters: {pattern}")
    return found


def _tokens(pattern: str) -> list[str]:
    """Characters, escapes, classes and whole groups, as they follow each other."""
    tokens = []
    at = 0
    while at < len(pattern):
        end = _end(pattern, at)
        tokens.append(pattern[at:end])
        at = end
    return tokens


def _end(pattern: str, at: int) -> int:
    """Where the token that begins here ends."""
    match pattern[at]:
        case "\\":
            return at + 2
        case "[":
            end = at + 2  # a class has one member at least, which may be "]"
            while pattern[end] != "]":
                end += 2 if pattern[end] == "\\" else 1
            return end + 1
        case "{":
            return pattern.index("}", at) + 1
        case "(":
            end = at + 1
            while pattern[end] != ")":
                end = _end(pattern, end)
            return end + 1
        case _:
            return at + 1


def _alternatives(tokens: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == "|":
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _runs(tokens: list[str]) -> list[str]:
    """The runs of plain letters among the tokens."""
    runs = [""]
    for token in tokens:
        if token[0] in "?*{":  # what stands before it may be missing
            runs[-1] = runs[-1][:-1]
            runs.append("")
        elif token[0] == "\\" and token[1] in "bB":
            continue
        elif token[0] == "\\" and not token[1].isalnum():
            runs[-1] += token[1]
        elif len(token) > 1 or token in ".^$+":
            runs.append("")
        else:
            runs[-1] += token
    return runs
