"""Shared memory: who owns which bytes. memory.py maps it, slots.py hands it out, pack.py fills it."""
