"""Workers as processes of this machine; the only place that knows Linux. Start reading at host.py.

In the trainer:
host         LocalHost: orders in, events out
lifeline     its ends of one life: the pipe of tasks, letter boxes, slots
answers      what workers say becomes events
journals     what a dead worker had loaded, for its next life
leash        its hold on the keeper: process and socket
vigil        the wait for all of them
forks        what happens when the trainer forks
handlers     did a signal handler raise this?
birth        how a keeper comes to be
witness      who signals the trainer

In the keeper:
keeper       its loop: orders in, facts out
cradle       how a worker comes to be
life         what is known of one
watch        the tick: memory, descriptors, silence
look         what a worker has open, now and then: for when it is dead
closer       a worker that is silent for too long, looked at more closely
outbox       what waits to be said to the trainer
room         how many workers fit into memory
marks        when a worker shall make room for a fresh one
oom          the kernel's counters of kills for memory
evidence     facts taken at the moment
spy          a second opinion on a process that hangs

In a worker:
worker       its whole life
limits       that it sets for itself
raised       exceptions on their way to the trainer
transforms   was it a transform that raised?

Between them, and below:
wire         what they say to each other
pulse        the flight recorder: a shared page per worker
sender       who sent a signal
linux, procfs, cgroups, discreet, secret_patterns, private
"""
