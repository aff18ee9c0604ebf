"""Decides; stdlib only, no I/O, no clock. Start reading at messages.py, then ledger.py."""
