"""The arithmetic under the solvers and formats: bit streams, quantization grids, statistics of a layer's inputs."""
