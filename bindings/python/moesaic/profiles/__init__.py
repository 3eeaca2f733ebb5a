"""Profiles after they were recorded: their document, the views made of it, and what the system counted."""
