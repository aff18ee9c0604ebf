"""Workers as processes of this machine; the only place that knows Linux. Start reading at host.py."""
