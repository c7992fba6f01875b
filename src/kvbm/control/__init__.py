"""Where an engine can be reached from outside: the control socket, discovery of ranks, Dynamo's runtime."""
