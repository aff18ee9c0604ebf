"""Shared memory: who owns which bytes.

memory_file    anonymous memory files, sparse and mapped
slots          one life's memory, cut into slots and letter boxes: the trainer lends and frees them
slot_writer    how bytes get into a slot, or into a file of their own: stacking, copying
slot_claims    the worker's side: which slot it takes, and when it waits for one
pack           a batch to (spec, buffers) and back
forks          what a forked child of the trainer must close
shared_file    memory that many processes see; a process claims a part of it before it writes there
record_store   records by index in such memory: what CachedDataset keeps its samples in
"""
