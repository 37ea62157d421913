// The interface between group_columns and weight_grad: the columns of a pattern, grouped by neuron.
//
// Neurons are sorted by activity and divided into groups of 32. The *rows* of a group are the tokens
// for which any of its neurons is active, ascending: the rows of x and dy that its gradients need, each read once
// for all 32. They are processed in pieces of 64 rows, which may span token blocks.
//
//   member    [C]                    Member   the columns of group 0, of group 1, …; within a group
//                                             by token block
//   piece     [C + groups]           uint2    first and last + 1 member of each piece: its blocks'
//   unit      [groups + max_parts]  Unit     runs of pieces, the most active group's first
//   control   [2]                    uint32   see below; zeroed
//   progress  [1 + max_parts * slices]  uint32   of weight_grad alone, see below; zeroed
//
// and between fill_pieces and weight_grad: the pieces' values, unit by unit.
//
//   work         [groups + max_parts]      uint2  each unit's first row among those of all pieces,
//                                                  and its rows
//   piece_x, piece_dy  [pieces][64]         uint32 the row of x, and of dy, where there is one: the same
//                                                  array if both have the same order
//   piece_values [pieces][64][3][32]        bf16   d_gate, d_up and gate · up of the row's token and
//                                                  the neurons (without a gate, two: d_up and up);
//                                                  zero where the neuron is not active
#pragma once
#include "common/element.cuh"
#include "common/union.cuh"

using namespace group_tiles;
static_assert(group_neurons == 32, "each lane has a neuron of the group");
static_assert(2 * group_neurons == block_tokens, "two matrices take the place of a block's tokens");

// A group with many rows is split into parts, whose sums are added through memory: the maximum number.
constexpr int max_parts = 60;

// One neuron in one token block; pairs are for its tokens 0–31 and 32–63.
struct alignas(16) Member {
  uint32 mask[2];  // tokens for which it is active
  uint32 all[2];   // tokens for which any neuron of the group is active
  int row[2];      // the group's row of the first of `all`
  uint32 column;   // where its values are
  uint32 where;    // token block << 5 | neuron within the group
};

struct alignas(16) Unit {
  int group, rows;   // rows of the group
  int piece, pieces; // first (in `piece`) and number
  int first_row;     // of the first piece, in the group
  int slot;          // of its sums among the `max_parts`, if there are several parts
  int part, parts;
};

static_assert(sizeof(Member) == 32 && sizeof(Unit) == 32, "two loads of 16 bytes");
static_assert(uint64(max_blocks) * group_neurons <= 1ull << 32, "`where` of a member");

// Words of `control`, and of `progress`: for each first part of a group, and slice, how many of the
// group's parts are done.
constexpr int total_units = 0, groups_planned = 1, group_control_words = 2;
static_assert(total_units < group_control_words && groups_planned < group_control_words);
constexpr int next_unit = 0, arrived = 1;
