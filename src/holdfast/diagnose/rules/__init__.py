"""All rules, in the order in which they are asked: the most specific first."""

from holdfast.diagnose.finding import Rule
from holdfast.diagnose.rules import data, deaths, hang, resources

ALL: tuple[Rule, ...] = (
    *deaths.STARTUP,
    *hang.RULES,
    *resources.RULES,
    *deaths.RULES,
    *data.RULES,
)
