// TwELL, tile-wise ELLPACK, as the paper defines it (arXiv 2603.23198): the active part of an M × N
// activation matrix, packed row by row within tiles of 256 neurons.
//
// A tile has 32 words of 32 bits per row, `twell_width`: first the number of non-zeros of the row in the
// tile, then the non-zeros by ascending neuron, each an element in the high half and its neuron, of all
// N, in the low half. Words beyond the count are not written.
//
//   word    [M][tiles][32]  uint32
//   control [8]             uint32   see below; zeroed by the gate
//
// The count includes non-zeros that are not stored. A count above 31 tells every reader that the tile
// has overflowed: such rows are recomputed from x (common/dense_rows.cu).
#pragma once
#include "common/element.cuh"
#include "common/tiles.cuh"

__device__ __forceinline__ uint32 twell_word(uint32 value_high, uint32 neuron) {
  return (value_high & 0xffff0000u) | neuron;
}
__device__ __forceinline__ float word_value(uint32 word) { return element_high(word); }
__device__ __forceinline__ uint32 word_neuron(uint32 word) { return word & 0xffffu; }

// Added to the count of a row for each tile that overflowed: more than any count, and small enough that
// 256 times this and all counts fit 32 bits.
constexpr uint32 not_held = 1u << 17;
static_assert(not_held > max_neurons);
static_assert(uint64(max_neurons / tile_neurons) * not_held + max_neurons < 1ull << 32);

// Words of `control`: rows left to dense_rows; blocks of threads that have finished; non-zeros of all
// rows, 64 bits; work items of dense_rows that are claimed, and finished; in training, rows that the
// backup has no room for, 64 bits.
constexpr int num_overflowed = 0, num_finished = 1, num_nonzeros = 2, next_item = 4, items_done = 5;
constexpr int num_recomputed = 6;
static_assert(items_done < num_recomputed && num_recomputed + 2 <= control_words);
static_assert(num_nonzeros % 2 == 0 && num_nonzeros + 2 <= next_item, "64 bits");
static_assert(num_recomputed % 2 == 0, "64 bits");
