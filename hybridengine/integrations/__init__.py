"""Plug-ins for other people's trainers."""
