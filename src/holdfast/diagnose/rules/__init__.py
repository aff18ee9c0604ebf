"""All rules, in the order in which they are asked: the most specific first."""

from holdfast.diagnose.finding import Rule
from holdfast.diagnose.rules import crash, data, hang, signals, startup

ALL: tuple[Rule, ...] = (
    *startup.RULES,
    *hang.RULES,
    *crash.RULES,
    *signals.RULES,
    *data.RULES,
)
