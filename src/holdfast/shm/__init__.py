"""Shared memory: who owns which bytes.

memory_file    anonymous memory files, sparse and mapped
slots          one life's memory, cut into slots and letter boxes: the trainer lends and frees them
slot_writer    the worker's side: which slot it takes, when it waits for one, how bytes get into it
pack           a batch to (spec, buffers) and back
main_module    `__main__` on its way to processes that cannot import it
forks          what a forked child of the trainer must close
shared_file    memory that many processes see; a process claims a part of it before it writes there
record_store   records by index in such memory: what CachedDataset keeps its samples in
"""
