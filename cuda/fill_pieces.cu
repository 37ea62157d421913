// fill_pieces: the values of the pieces of group_columns as small dense matrices, for weight_grad,
// which reads them once for every 512 columns of x and of dy (weight_grad.cuh has the result).
//
// A block of threads a piece, and then another. Eight lanes a column: 16 bytes of each matrix, where
// one of their tokens fires.
#include "weight_grad.cuh"

namespace {
constexpr int num_threads = 256, column_lanes = 8, lane_tokens = block_tokens / column_lanes;
constexpr int batch = num_threads / column_lanes;  // columns at once

struct alignas(128) Shared {
  bf16 values[piece_rows * 3 * group_neurons];
  int token[piece_rows];
  int sum[num_threads / 32];
  // Of the unit that a piece is of: its first piece, its first in `piece`, its group's rows, its own
  // first.
  int first, piece, rows, first_row;
};

// The sum of the threads before this one, and of all.
struct Sums {
  int before, total;
};

__device__ Sums sum_threads(Shared& shared, int own) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) shared.sum[warp] = sum;
  __syncthreads();
  Sums sums{sum - own, 0};
#pragma unroll
  for (int i = 0; i < num_threads / 32; ++i) {
    const int other = shared.sum[i];
    sums.before += i < warp ? other : 0;
    sums.total += other;
  }
  return sums;
}

// The token of a value, of a lane's eight: token_at(lane * 8 + place).
__device__ __forceinline__ int token_of(int part, int place) {
  return part / 2 * 16 + part % 2 * 4 + place / 2 % 2 * 8 + place / 4 * 2 + place % 2;
}

struct Octet {
  uint4 word;
  __device__ __forceinline__ uint32 at(int i) const {
    const uint32 pair = i / 2 == 0 ? word.x : i / 2 == 1 ? word.y : i / 2 == 2 ? word.z : word.w;
    return i % 2 == 0 ? pair & 0xffffu : pair >> 16;
  }
};

__device__ __forceinline__ Octet load(const bf16* matrix, uint64 at) {
  return {*reinterpret_cast<const uint4*>(matrix + at)};
}

struct Matrices {
  const bf16 *d_gate, *d_up, *gate, *up;  // d_gate and gate: if gated
  bool gated;
};

// A part of one column: eight of its values.
struct Part {
  uint32 fires, tokens;  // of the part's 32 tokens: of this column; of the group
  int row;               // of the first of them
  uint32 where;
  Octet d_gate, d_up, gate, up;
};

// Tokens of a part of eight: four bits and four more, eight further.
__device__ __forceinline__ uint32 tokens_of(int part) {
  return 0x0f0fu << (part % 4 / 2 * 16 + part % 2 * 4);
}

__device__ __forceinline__ void load_part(const Matrices& m, const Member& member, int part,
                                          Part& out) {
  const bool upper = part >= column_lanes / 2;
  out.where = member.where;
  out.row = upper ? member.row[1] : member.row[0];
  out.tokens = upper ? member.all[1] : member.all[0];
  out.fires = (upper ? member.mask[1] : member.mask[0]) & tokens_of(part);
  if (out.fires == 0) return;
  const uint64 at = static_cast<uint64>(member.column) * block_tokens + part * lane_tokens;
  out.d_up = load(m.d_up, at);
  out.up = load(m.up, at);
  if (m.gated) {
    out.d_gate = load(m.d_gate, at);
    out.gate = load(m.gate, at);
  }
}

__device__ __forceinline__ void scatter(Shared& shared, bool gated, const Part& in, int part,
                                        int first_row) {
  if (in.fires == 0) return;
  const int neuron = in.where % group_neurons, matrices = gated ? 3 : 2;
  const int block = (in.where >> 5) * block_tokens;
  const int base = in.row - first_row;
#pragma unroll
  for (int i = 0; i < lane_tokens; ++i) {
    const int token = token_of(part, i);
    if ((in.fires >> token % 32 & 1) == 0) continue;
    const int row = base + __popc(in.tokens & ((1u << token % 32) - 1));
    if (static_cast<uint32>(row) >= piece_rows) continue;  // of the piece before or after
    bf16* to = shared.values + row * matrices * group_neurons + neuron;
    const uint32 up = in.up.at(i);
    if (gated) {
      to[0] = in.d_gate.at(i);
      to += group_neurons;
    }
    to[0] = in.d_up.at(i);
    to[group_neurons] =
        gated ? pack_bf16(bf16_low(in.gate.at(i)) * bf16_low(up), 0.0f) : up;
    shared.token[row] = block + token;
  }
}

// One piece: members [from, to).
__device__ __forceinline__ void fill(Shared& shared, const Matrices& m, const Member* member,
                                     uint2 members, int first_row, int rows, uint32* token_out,
                                     uint4* out) {
  const int words = piece_rows * (m.gated ? 3 : 2) * group_neurons * 2 / 16;
  uint4* values = reinterpret_cast<uint4*>(shared.values);
  const int part = threadIdx.x % column_lanes, to = members.y;
  int at = members.x + threadIdx.x / column_lanes;
  constexpr int burst = 2;
  Part own[burst];
#pragma unroll
  for (int i = 0; i < burst; ++i) {
    own[i].fires = 0;
    if (at + i * batch < to) load_part(m, member[at + i * batch], part, own[i]);
  }
  for (int i = threadIdx.x; i < words; i += num_threads) values[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  while (true) {
#pragma unroll
    for (int i = 0; i < burst; ++i) scatter(shared, m.gated, own[i], part, first_row);
    at += burst * batch;
    if (at - static_cast<int>(threadIdx.x / column_lanes) >= to) break;
#pragma unroll
    for (int i = 0; i < burst; ++i) {
      own[i].fires = 0;
      if (at + i * batch < to) load_part(m, member[at + i * batch], part, own[i]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < words; i += num_threads) out[i] = values[i];
  const int row = threadIdx.x;
  if (row < rows) token_out[row] = shared.token[row];
}
}  // namespace

extern "C" __global__ void __launch_bounds__(num_threads, 4)
    fill_pieces(const bf16* d_gate, const bf16* d_up, const bf16* gate, const bf16* up, int gated,
                const Member* member, const uint2* piece, const Unit* unit, const uint32* control,
                int* piece_first, uint32* piece_token, bf16* piece_values) {
  extern __shared__ __align__(128) unsigned char raw[];
  await_previous_kernel();
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const Matrices m{d_gate, d_up, gate, up, gated != 0};
  const int units = control[total_units], last = (units - 1) / num_threads * num_threads;

  // Units by `num_threads`: a thread has one, and its first piece.
  int first_unit = 0, before = 0, total = 0, own_first = 0;
  Unit own_unit{};
  const auto look_at = [&](int units_from) {
    first_unit = units_from;
    const int own = first_unit + static_cast<int>(threadIdx.x);
    own_unit = own < units ? unit[own] : Unit{};
    const Sums sums = sum_threads(shared, own_unit.pieces);
    own_first = before + sums.before;
    total = before + sums.total;
  };
  // How many there are in all; block 0 says so to weight_grad.
  for (int from = 0; from <= last; from += num_threads) {
    before = total;
    look_at(from);
    const int own = from + threadIdx.x;
    if (blockIdx.x == 0 && own < units) piece_first[own] = own_first;
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
    __syncthreads();
    const int done = at - shared.first, first_row = shared.first_row + done * piece_rows;
    fill(shared, m, member, piece[shared.piece + done], first_row,
         min(piece_rows, shared.rows - first_row), piece_token + static_cast<uint64>(at) * piece_rows,
         reinterpret_cast<uint4*>(piece_values + static_cast<uint64>(at) * piece_rows * matrices *
                                                     group_neurons));
    __syncthreads();
  }
}

extern "C" __device__ const uint32 fill_pieces_shared_bytes = sizeof(Shared);
