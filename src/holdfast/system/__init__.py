"""What only asks Linux: /proc, control groups, prctl, signals; and what is kept of the answers as evidence.

linux             system calls and files that the standard library does not wrap; limits that a process sets for itself
procfs            what /proc tells of a process
cgroups           limits and counters of control groups, and the kernel's counters of kills for memory
evidence          facts taken at the moment of an incident
snapshot          what a process has open; a second opinion on one that hangs (py-spy)
signal_origin     who sent a signal, and which handler raised
run_files         private folders and files, and logs that grow by whole lines
redact            command lines without their secrets
secret_patterns   what secrets look like
"""
