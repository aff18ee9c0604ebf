"""All rules, in the order in which they are asked: the most specific first."""

from holdfast.diagnose.finding import Rule
from holdfast.diagnose.rules import crash, data, hang, limits, memory, signals

ALL: tuple[Rule, ...] = (
    *crash.STARTUP,
    *hang.RULES,
    *memory.RULES,
    *limits.RULES,
    *crash.RULES,
    *signals.RULES,
    *data.RULES,
)
