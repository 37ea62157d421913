"""The numbers of a step: counted on the device and reduced over ranks; the kernels they choose."""
