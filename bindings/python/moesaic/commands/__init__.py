"""The commands of the command line, one module each; the others are their parts."""
