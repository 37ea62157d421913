// The union format: how the kernels store the active part of an M × N activation matrix.
//
// Tokens are divided into blocks of 64, neurons into tiles of 256. In a block, the neurons of a tile
// that are active for at least one of its tokens form the tile's union. For each member of the union the
// values of all 64 tokens are stored: a dense column that tensor cores can read. Nothing can overflow:
// the union of a full tile has 256 members.
//
//   count   [blocks][tiles]              uint32   size of each union
//   neuron  [blocks][tiles][256]         uint8    its members, column within the tile
//   value   [blocks][tiles][256][64]     element  their values, one a token (order: token_at)
//   entry   [blocks][tiles * 256]        uint32   all unions of a block in a row: column slot
//                                                 (tile * 256 + place) << 16 | neuron
//   total   [blocks]                     uint32   the number of these entries
//
// and, to schedule the work of the kernels after the gate:
//
//   unit    [blocks * tiles]             uint32×2 256 entries of a block: block << 16 | which 256,
//                                                 and how many entries there are from there on
//   order   [blocks + splits]            uint32×2 a block and its total, or a part of a heavy block:
//                                                 its place in `split` + 1 << 16 | block, and its
//                                                 members; both the largest first
//   split   [splits]                     uint32×2 parts of heavy blocks, contiguous for each block:
//                                                 the first member; which part << 16 | of how many
//   control [8]                          uint32   see below; zeroed by the gate
#pragma once
#include "common/tiles.cuh"

constexpr int unit_members = 256;

__device__ __forceinline__ uint32 entry_of(uint32 slot, uint32 neuron) { return slot << 16 | neuron; }
__device__ __forceinline__ uint32 entry_slot(uint32 entry) { return entry >> 16; }
__device__ __forceinline__ uint32 entry_neuron(uint32 entry) { return entry & 0xffffu; }

// Never an entry, at any N: the slot and the neuron of an entry are in the same tile.
constexpr uint32 no_entry = 0xffff0000u;
static_assert((no_entry >> 16) / tile_neurons != (no_entry & 0xffffu) / tile_neurons);

// Tokens are stored in an order that lets a thread of a consumer warp write its four values of a column
// at once: the token, of 16, at a place of `value`.
__device__ __forceinline__ int token_at(int place) {
  return place / 2 % 2 * 8 + place / 4 * 2 + place % 2;
}

// Words of `control`.
constexpr int num_units = 0, next_up = 1, next_down = 2, finished = 3, num_entries = 4;
constexpr int num_parts = 5;  // of `order`
static_assert(num_entries < control_words && num_parts < control_words);
