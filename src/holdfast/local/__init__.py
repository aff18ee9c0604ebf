"""Workers as processes of this machine, one folder per process. Start reading at trainer/local_host.py.

protocol/   what they say to each other
  wire             messages
  pulse            the flight recorder: a shared page per worker
worker/     what runs in a worker
  worker_loop      its whole life
  thresholds       when it has taken so much that it makes room for a fresh one
keeper/     what runs in the keeper
  keeper_loop      orders in, facts out; how a death is read: signal, exit, deadline
  fork_worker      how a worker comes to be
  worker_life      what is known of one; how long it may be silent
  worker_watch     the tick: memory, descriptors, silence; a closer look at a worker that hangs
  memory_budget    how many workers fit into memory
  fact_log         what happens, into the run folder
trainer/    what runs in the trainer
  local_host       LocalHost: orders in, events out
  worker_channel   its ends of one life: the pipe of tasks, letter boxes, slots; what workers say becomes events
  process_handles  its hold on the keeper: process and socket; what third parties see of a worker
  keeper_birth     how a keeper comes to be
  signal_witness   who signals the trainer

An import points one way, down this list.
"""
