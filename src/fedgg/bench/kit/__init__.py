"""Code for all contenders. This folder is put on the Python path of environments in which fedgg is not installed."""
