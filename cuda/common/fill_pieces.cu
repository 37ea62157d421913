// fill_pieces: the values of the pieces of group_columns as small dense matrices, for weight_grad,
// which reads them once for every 512 columns of x and of dy (weight_grad.cuh has the result).
//
// A block of threads processes one piece after another. First two lanes per column list the tokens
// for which its neuron is active and that have rows in the piece, then one lane per non-zero fetches its values.
#include "common/block_sums.cuh"
#include "common/weight_grad.cuh"

namespace {
constexpr int num_threads = 256, blocks_each = 5, lists = num_threads / 32, list_rows = piece_rows / lists;
static_assert(lists * list_rows == piece_rows);
static_assert(block_tokens == 1 << 6 && group_neurons == 1 << 5, "`where` of an item");

struct Item {
  uint32 column;
  uint32 where;  // token of its block | neuron of the group << 6 | row of the piece << 11
};

struct alignas(128) Shared {
  element values[piece_rows * 3 * group_neurons];
  Item item[lists][list_rows * group_neurons];  // a list for a warp, of every eighth row
  uint32 count[lists];
  int token[piece_rows];
  uint32 sum[num_threads / 32];
  // Of the unit that a piece belongs to: the number of its first piece, that piece's place in `piece`,
  // its group's rows, and its first row.
  int first, piece, rows, first_row;
};

struct Matrices {
  const element *d_gate, *d_up, *gate, *up;  // d_gate and gate: if gated
  bool gated;
};

// Lists the non-zeros of one half of a column that have rows in the piece.
__device__ __forceinline__ void list_half(Shared& shared, const Member& member, int half,
                                          int first_row) {
  const bool upper = half != 0;
  const uint32 all = upper ? member.all[1] : member.all[0];
  const int base = (upper ? member.row[1] : member.row[0]) - first_row;
  const uint32 first_token = member.where / group_neurons * block_tokens + half * 32;
  const uint32 where = half * 32 | member.where % group_neurons << 6;
  for (uint32 left = upper ? member.mask[1] : member.mask[0]; left != 0; left &= left - 1) {
    const int token = __ffs(left) - 1, row = base + __popc(all & ((1u << token) - 1));
    if (static_cast<uint32>(row) >= piece_rows) continue;  // of the piece before or after
    const int list = row % lists;
    shared.item[list][atomicAdd(shared.count + list, 1)] =
        Item{member.column, where + token + (row << 11)};
    shared.token[row] = first_token + token;
  }
}

// Where the value of a token of a block lies in its column: the inverse of token_at.
__device__ __forceinline__ uint32 value_at(uint32 token) {
  return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

__device__ __forceinline__ void fetch(Shared& shared, const Matrices& m, const Item& item) {
  const uint64 at = static_cast<uint64>(item.column) * block_tokens + value_at(item.where % 64);
  const uint32 neuron = item.where >> 6 & 31, row = item.where >> 11;
  element* to = shared.values + row * (m.gated ? 3 : 2) * group_neurons + neuron;
  const uint32 d_up = m.d_up[at], up = m.up[at];
  if (!m.gated) {
    to[0] = d_up;
    to[group_neurons] = up;
    return;
  }
  const uint32 d_gate = m.d_gate[at], gate = m.gate[at];
  to[0] = d_gate;
  to[group_neurons] = d_up;
  to[2 * group_neurons] = pack_elements(element_low(gate) * element_low(up), 0.0f);
}

// One piece: members [from, to), `rows` rows. `count` is zero.
__device__ __forceinline__ void fill(Shared& shared, const Matrices& m, const Member* member,
                                     uint2 members, int first_row, int rows, const int* token_M,
                                     uint32* x_row, uint32* dy_row, uint4* out) {
  const int words = piece_rows * (m.gated ? 3 : 2) * group_neurons * 2 / 16;
  const int thread = threadIdx.x, list = thread / 32;
  uint4* values = reinterpret_cast<uint4*>(shared.values);
  for (int i = thread; i < words; i += num_threads) values[i] = make_uint4(0, 0, 0, 0);
  for (uint32 at = members.x + thread / 2; at < members.y; at += num_threads / 2)
    list_half(shared, member[at], thread % 2, first_row);
  __syncthreads();
  const int x = thread < rows ? shared.token[thread] : 0;
  const int dy = thread < rows && token_M != nullptr ? token_M[x] : 0;  // loads while values are fetched
  for (uint32 i = thread % 32; i < shared.count[list]; i += 32)
    fetch(shared, m, shared.item[list][i]);
  if (thread < rows) x_row[thread] = x;
  if (thread < rows && token_M != nullptr) dy_row[thread] = dy;
  __syncthreads();
  for (int i = thread; i < words; i += num_threads) out[i] = values[i];
}
}  // namespace

extern "C" __global__ void __launch_bounds__(num_threads, blocks_each)
    fill_pieces(const element* d_gate, const element* d_up, const element* gate, const element* up,
                int gated, const Member* member, const uint2* piece, const Unit* unit,
                const uint32* control, uint2* work, const int* token_M, uint32* piece_x,
                uint32* piece_dy, element* piece_values) {
  await_previous_kernel();
  Shared& shared = dynamic_shared<Shared>();
  const Matrices m{d_gate, d_up, gate, up, gated != 0};
  const int units = control[total_units], last = (units - 1) / num_threads * num_threads;

  // Units by `num_threads`: a thread has one, and its first piece.
  int first_unit = 0, before = 0, total = 0, own_first = 0;
  Unit own_unit{};
  const auto look_at = [&](int units_from) {
    first_unit = units_from;
    const int own = first_unit + static_cast<int>(threadIdx.x);
    own_unit = own < units ? unit[own] : Unit{};
    const Sums sums = sum_threads(shared.sum, own_unit.pieces);
    own_first = before + sums.before;
    total = before + sums.total;
  };
  // How many there are in all; block 0 says so to weight_grad.
  for (int from = 0; from <= last; from += num_threads) {
    before = total;
    look_at(from);
    const int own = from + threadIdx.x;
    const int rows = min(own_unit.pieces * piece_rows, own_unit.rows - own_unit.first_row);
    if (blockIdx.x == 0 && own < units) work[own] = make_uint2(own_first * piece_rows, rows);
  }
  const int pieces = total;

  if (last > 0) {
    before = 0;
    look_at(0);
  }
  const int matrices = gated ? 3 : 2;
  for (int at = blockIdx.x; at < pieces; at += gridDim.x) {
    while (at >= total) {
      before = total;
      look_at(first_unit + num_threads);
    }
    if (at >= own_first && at < own_first + own_unit.pieces) {
      shared.first = own_first;
      shared.piece = own_unit.piece;
      shared.rows = own_unit.rows;
      shared.first_row = own_unit.first_row;
    }
    if (threadIdx.x < lists) shared.count[threadIdx.x] = 0;
    __syncthreads();
    const int done = at - shared.first, first_row = shared.first_row + done * piece_rows;
    const uint64 row = static_cast<uint64>(at) * piece_rows;
    fill(shared, m, member, piece[shared.piece + done], first_row,
         min(piece_rows, shared.rows - first_row), token_M, piece_x + row, piece_dy + row,
         reinterpret_cast<uint4*>(piece_values + row * matrices * group_neurons));
    __syncthreads();
  }
}

extern "C" __device__ const uint32 exported_blocks = blocks_each, exported_shared_bytes = sizeof(Shared);
