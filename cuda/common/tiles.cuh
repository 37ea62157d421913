// How both formats, the union (common/union.cuh) and TwELL (common/twell.cuh), cut an M × N activation
// matrix: the column tile is that of the gate's GEMM, whose epilogue packs it.
#pragma once
#include "common/ptx.cuh"

constexpr int block_tokens = 64;
constexpr int tile_neurons = 256;
constexpr int control_words = 8;  // counters of a call, zeroed by the gate; each format names its own
