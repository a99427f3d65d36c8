"""The command line. A module for each command, which `app.py` imports when it is called."""
