"""Task: one batch on its way, and what it has been through. The ledger writes the first, the inquest the second."""

# Samples that may be tried in the place of a bad one.
SPARES = 8


class Task:
    """One batch on its way."""

    __slots__ = (
        "alone",
        "attempt",
        "bad",
        "deadly",
        "done",
        "id",
        "lives",
        "number",
        "past",
        "result",
        "samples",
        "stay",
        "worker",
    )

    def __init__(self, id: int, samples: int, lives: int | None) -> None:
        self.id = id
        self.lives = lives
        self.samples = samples
        self.attempt = 0
        self.worker = -1
        self.number = 0  # of its worker's stream
        self.alone = False
        self.done = False
        self.result: object = None
        self.bad: tuple[int, ...] = ()  # positions of samples that kill
        self.deadly: tuple[int, ...] = ()  # spares that do, counted from 1
        self.stay = -1  # up to here a fresh worker did not help
        self.past: Past | None = None  # of the few that have one


class Past:
    """What a task has been through whose worker died, or left, while it was on it."""

    __slots__ = ("crashes", "hits", "reached", "spent")

    def __init__(self) -> None:
        self.reached = -1  # the furthest position that was ever begun
        self.crashes: dict[int, int] = {}  # position -> lives it ended at face value
        self.hits: dict[int, tuple[int, float]] = {}  # position -> (maybe random deaths, seconds exposed)
        self.spent = -1  # the furthest position at which a life ran out of something


def past_of(task: Task) -> Past:
    """Its past, which begins now if it had none."""
    if task.past is None:
        task.past = Past()
    return task.past
