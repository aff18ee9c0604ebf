"""Command lines without the secrets in them: they go into evidence, reports and logs, and from there anywhere."""

import re

HIDDEN = "***"
_SECRET = r"[\w.-]*(?:pass(?:word|wd|phrase|code)?|token|secret|credentials?|api[-_]?key|access[-_]?key|auth)"
# --password x, --token=x, -pass x: the value is the next word, or what follows the equals sign or colon.
_OPTION = re.compile(rf"(?i)(?<!\S)(--?{_SECRET})(=|\s+)(\"[^\"]*\"|'[^']*'|\S+)")
# PASSWORD=x, api_key=x, -Dspark.secret=x, "token": x, ...?key=x&sig=y
_PAIR = re.compile(
    rf"(?i)((?:\b|-D){_SECRET}|[?&;](?:key|sig|signature)|(?<!\S)key)([\"']?(?:=|:\s?))(\"[^\"]*\"|'[^']*'|[^\s&;,]+)"
)
# scheme://user:password@host
_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE)
# Authorization: Bearer x
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")


def mask(command: str) -> str:
    """The same command line; what looks like a secret is replaced. Rather one too many than one too few."""
    command = _BEARER.sub(rf"\1 {HIDDEN}", command)
    command = _IN_URL.sub(rf"\1{HIDDEN}@", command)
    command = _OPTION.sub(rf"\1\2{HIDDEN}", command)
    return _PAIR.sub(rf"\1\2{HIDDEN}", command)
