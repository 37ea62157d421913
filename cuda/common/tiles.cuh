// All sizes of tiles: of the formats, which the host knows too, and of the kernels that multiply, one
// namespace each. What the code takes for granted of them is asserted beside it.
#pragma once
#include "common/ptx.cuh"

// --- the formats ---------------------------------------------------------------------------------

// How the union (common/union.cuh) and TwELL (common/twell.cuh) cut an M × N activation matrix, and how
// large one may be. sparsellm/ffn/types.py has the same numbers, for machines without a GPU;
// tests/ffn/kernels/test_compile.py compares them.
constexpr int block_tokens = 64;
constexpr int tile_neurons = 256;  // the column tile of the gate's GEMM, whose epilogue packs it
constexpr uint32 twell_width = tile_neurons / 8;  // words per row of a tile: compression 8, as in the paper
constexpr int control_words = 8;  // counters of a call, zeroed by the gate; each format names its own

constexpr int max_neurons = 65536;     // 16-bit numbers
constexpr int max_blocks = 65536;      // of tokens, in the union format: 16-bit numbers
constexpr int max_ell_width = 1024;    // of the hybrid format: what a list holds (common/walk.cuh)
constexpr int dense_row_tile = 128;    // of the hybrid format's dense backup (common/dense_rows.cuh)
constexpr int max_decode_tokens = 64;  // up to which no format is needed (common/decode.cuh)

static_assert(block_tokens == 8 * sizeof(uint64), "a member's mask has a bit for each token");
static_assert(tile_neurons % 32 == 0, "warps look at 32 neurons of a tile at a time");
static_assert(tile_neurons <= 1 << 8, "a neuron's place in its tile is a byte");
static_assert(max_neurons <= 1 << 16 && max_neurons % tile_neurons == 0, "neurons are 16-bit numbers");
static_assert(max_blocks <= 1 << 16, "token blocks are 16-bit numbers");
static_assert(twell_width % 4 == 0, "the first words of a tile's row are read 16 bytes at a time");

// --- Hopper: the tiles of sm90/ ------------------------------------------------------------------

// Each has a producer warpgroup and two consumer warpgroups, whose registers are set by setmaxnreg.
namespace gate_tiles {  // sm90/gate.cuh
constexpr int tile_m = 128, tile_n = tile_neurons, stages = 3, cluster = 2;
constexpr int row_bytes = 128;  // of k, in a stage: the span of the swizzle
constexpr int group_m = 8;  // cluster rows that walk over all of N together: x stays in L2
constexpr int producer_registers = 56, consumer_registers = 224;
}  // namespace gate_tiles

namespace up_tiles {  // sm90/up.cuh
constexpr int tile_k = 64, stages = 5;
constexpr int step_group = 4;  // stages that the producer fills without looking at the work units
constexpr int producer_registers = 120, consumer_registers = 192;
}  // namespace up_tiles

namespace down_tiles {  // sm90/down.cuh
constexpr int stage_entries = 32, stages = 6, unit_columns = 512;
constexpr int panel = 64;     // columns of a panel: the span of the swizzle
constexpr int lookahead = 4;  // stages whose entries are loaded before their turn
constexpr int producer_registers = 88, consumer_registers = 208;
}  // namespace down_tiles

// --- all other GPUs: the tiles of sm80/ ----------------------------------------------------------

namespace ring_tiles {  // sm80/ring.cuh
constexpr int block_threads = 256, warp_rows = 32, warp_columns = 64;
constexpr int stage_inner = 32, unit_columns = 256, min_stages = 4, max_stages = 6;
}  // namespace ring_tiles

// --- every GPU: the tiles of common/ -------------------------------------------------------------

namespace dense_tiles {  // common/dense_rows.cuh
constexpr int gemm_threads = 256, gemm_tile = dense_row_tile, gemm_inner = 32, gemm_stages = 4;
constexpr int max_partial_tiles = 128, max_parts = 8;  // of split products: tiles of all parts; parts
constexpr int added_rows = 16;                         // of a tile, whose parts a block adds up at a time
}  // namespace dense_tiles

namespace group_tiles {  // common/weight_grad.cuh
constexpr int group_neurons = 32, piece_rows = 64;
}  // namespace group_tiles

namespace decode_tiles {  // common/few_tokens.cuh, decode.cuh
constexpr int num_warps = 8;
constexpr int tile_rows = 16, slots = 8;  // slots: of a warp's ring of copies
constexpr int max_section = 1024;         // neurons that a block of decode_gate has at most
}  // namespace decode_tiles

namespace decode_down_tiles {  // common/decode_down.cu
constexpr int block_columns = 16, group = 16, window = 2048;  // neurons: a product's, and of the list
constexpr int speculative = 16;  // neurons of a section that are loaded along with their count
}  // namespace decode_down_tiles

namespace transpose_tiles {  // common/transpose.cu
constexpr int threads = 128, tile_rows = 64, row_chunks = 8;  // chunk: 16 bytes
}  // namespace transpose_tiles

namespace column_tiles {  // common/union_columns.cu
constexpr int threads = 256, blocks_each = 4, batch = 16;  // batch: members of a strip
}  // namespace column_tiles

namespace walk_tiles {  // common/walk.cuh
constexpr int walk_threads = 128, max_rows = 8, dot_chunks = 8, sum_chunks = 2, sum_entries = 8;
}  // namespace walk_tiles
