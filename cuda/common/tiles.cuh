// The sizes of the formats: how the union (common/union.cuh) and TwELL (common/twell.cuh) cut an M × N
// activation matrix, and how large one may be. sparsellm/ffn/types.py has the same numbers, for machines
// without a GPU; tests/ffn/kernels/test_compile.py compares them.
#pragma once
#include "common/ptx.cuh"

constexpr int block_tokens = 64;
constexpr int tile_neurons = 256;  // the column tile of the gate's GEMM, whose epilogue packs it
constexpr uint32 twell_width = tile_neurons / 8;  // words per row of a tile: compression 8, as in the paper
constexpr int control_words = 8;  // counters of a call, zeroed by the gate; each format names its own

constexpr int max_neurons = 65536;     // 16-bit numbers
constexpr int max_blocks = 65536;      // of tokens, in the union format: 16-bit numbers
constexpr int max_ell_width = 1024;    // of the hybrid format: what a list holds (common/walk.cuh)
constexpr int dense_row_tile = 128;    // of the hybrid format's dense backup (common/dense_rows.cuh)
constexpr int max_decode_tokens = 64;  // up to which no format is needed (common/decode.cuh)
