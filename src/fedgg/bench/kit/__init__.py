"""What every contender may use, whoever wrote it: this folder is put on the path of environments without fedgg."""
