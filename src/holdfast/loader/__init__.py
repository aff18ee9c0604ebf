"""The DataLoader, CachedDataset and FileCache. The main path is iterator.py: index in, batch out.

In the trainer:
dataloader           DataLoader: torch's signature and attributes, policy and device; no logic
iterator             THE MAIN PATH, with workers; what a signal handler that raises leaves behind
epochs               its other part: the host is opened, an epoch begins, is left early, or ends
inline               the same without workers
batch_requests       what each task asks for; whether an epoch is whole
loader_narrator      the words: failures become bad samples and exceptions; totals
device               batches to the device, ahead of their turn
cuda_slots           slots that a CUDA device reads, and when each may be used again
probe                tries a dataset out for `holdfast doctor`

In a worker:
loader_job           what it does: fetch, collate into the slot, pack
fetch                samples of a map-style dataset under the policy: retries, skip, replace
stream               batches of an iterable dataset, its place and its snapshots
dataset_changes      what epochs have made of a dataset, for the next life
journal              what is loaded of a batch that has ended a life
collation            makes batches; which samples broke one
collate_guard        does user code come by a batch while torch collates it?
measure              measures samples for `holdfast doctor`

In both:
seeds                random numbers that depend on (base seed, batch) alone
tree                 goes through nested batches
cached               CachedDataset
files                FileCache
"""
