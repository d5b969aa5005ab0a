"""Models: the model and the batch that a command of the command line names."""
