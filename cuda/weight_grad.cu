// weight_grad: the weights' gradients of a sparse FFN, from columns in the order of group_columns.
//
//   gate[n] = Σ d_gate · x[token]    up[n] = Σ d_up · x[token]    down[n] = Σ gate · up · dy[token]
//
// A work unit is 32 neurons × 512 columns of x or dy × some pieces of 64 rows. Four building warps
// bring the rows, 16 a step, and make of each piece's values a small dense matrix, two pieces ahead
// of the eight warps that multiply, each of them 64 columns. Pieces follow each other without a
// gap, whatever unit they belong to. Slices of 512 columns are worked off one after the other: all
// tokens' slice fits into L2, and x as a whole does not (64 MB at 16384 × 2048).
//
// On real traces (16384 tokens, 16–44 fired neurons each) a group's rows are 0.46–0.63 of its
// (token, neuron) pairs; of groups of 16, 0.56–0.74; of 64, 0.33–0.50 at twice the products.
//
// A group of neurons that is split leaves its parts' sums in memory; who comes last adds them up,
// in their order: the same bits every time.
#include "mma.cuh"
#include "weight_grad.cuh"

namespace {
constexpr int multiply_warps = 8, build_warps = 4;
constexpr int multiply_threads = 32 * multiply_warps, build_threads = 32 * build_warps;
constexpr int block_threads = multiply_threads + build_threads;

constexpr int slice_columns = 512, step_rows = 16, piece_steps = piece_rows / step_rows;
constexpr int row_bytes = slice_columns * 2, value_bytes = piece_rows * 2;

// A block fits wherever 99 KB can be had (sm_86, 89, 120).
constexpr bool roomy = __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000;
constexpr int stages = roomy ? 5 : 4, lookahead = stages - 1;
static_assert(lookahead <= piece_steps, "rows are fetched once their piece is built");

// What is to be done with 64 rows.
struct Piece {
  int from, to;   // its members
  int first_row;  // in the group
  int rows;       // 64, or what is left
  int group, slice, slot, parts, part;
  bool last;   // of its unit
  bool valid;  // or else there is no more work
};

struct alignas(128) Shared {
  unsigned char rows[stages][step_rows * row_bytes];
  // [neuron, the second matrix below the first][row of the piece], in swizzled 16 bytes.
  unsigned char values[3][2 * group_neurons * value_bytes];
  int token[3][piece_rows];  // -1: none
  int neuron[3][group_neurons];  // of the weight; -1: none
  Piece piece[4];
  bool add_up;
};

struct Arguments {
  int k, n, slices;  // slices of x, and of dy
  bool gated;
  const bf16 *x, *dy, *d_gate, *d_up, *gate, *up;
  const uint32* order;
  const Member* member;
  const uint2* piece;
  const Unit* unit;
  const uint32* control;
  uint32* progress;
  float* sums;
  bool as_float;
  void *out_gate, *out_up, *out_down;

  __device__ bool of_x(int slice) const { return slice < slices; }
  // Two matrices of values at once: those of gate and up, which meet the same rows of x.
  __device__ bool twice(int slice) const { return gated && of_x(slice); }
  __device__ int first_column(int slice) const {
    return (of_x(slice) ? slice : slice - slices) * slice_columns;
  }
};

// Positions in the rings, which have three, four and `stages` places.
struct Turn {
  int of3 = 0, of4 = 0;
  __device__ __forceinline__ Turn ahead(int pieces) const {
    Turn turn = *this;
    turn.of3 = (of3 + pieces) % 3;
    turn.of4 = (of4 + pieces) % 4;
    return turn;
  }
};

// --- the order of work ---------------------------------------------------------------------------

// One thread walks over the pieces of this block's units; its loads run a piece, or a unit, ahead.
struct Walk {
  const Arguments& a;
  int total = 0, units;
  int index = 0, next_index, later;  // later: the unit after the next
  Unit unit, next;
  int done = 0;  // pieces of the unit
  uint2 members;

  __device__ void start() {
    units = a.control[total_units];
    total = units * 2 * a.slices;
    index = blockIdx.x;
    unit = fetch(index);
    next_index = take();
    next = fetch(next_index);
    later = take();
    look_up();
  }
  __device__ int take() { return gridDim.x + atomicAdd(a.progress + next_unit, 1); }
  __device__ Unit fetch(int at) const { return at < total ? a.unit[at % units] : Unit{}; }
  __device__ void look_up() {
    members = index < total ? a.piece[unit.piece + done] : make_uint2(0, 0);
  }
  __device__ Piece piece() const {
    const int begun = unit.first_row + done * piece_rows;
    return {static_cast<int>(members.x),
            static_cast<int>(members.y),
            begun,
            min(piece_rows, unit.rows - begun),
            unit.group,
            index < total ? index / units : 0,
            unit.slot,
            unit.parts,
            unit.part,
            done + 1 == unit.pieces,
            index < total};
  }
  __device__ void advance() {
    if (index >= total) return;
    if (++done == unit.pieces) {
      done = 0;
      index = next_index;
      unit = next;
      next_index = later;
      next = fetch(next_index);
      later = take();
    }
    look_up();
  }
};

// --- building ------------------------------------------------------------------------------------

__device__ __forceinline__ int builder() { return threadIdx.x - multiply_threads; }

// Starts the copies of 16 rows. Rows that are not there, and columns, become zeros.
__device__ __forceinline__ void copy_step(Shared& shared, const Arguments& a, Turn turn, int step,
                                          int stage) {
  const int lane = builder() % 32, warp = builder() / 32, slice = shared.piece[turn.of4].slice;
  const int column = a.first_column(slice) + lane * 8;
  const uint32 left = column < a.k ? 16 : 0, right = column + slice_columns / 2 < a.k ? 16 : 0;
  const bf16* from = (a.of_x(slice) ? a.x : a.dy) + column;
  const int* token = shared.token[turn.of3] + step * step_rows + warp;
  const uint32 to = smem_address(shared.rows[stage]) + warp * row_bytes + ((lane ^ warp) << 4);
#pragma unroll
  for (int i = 0; i < step_rows / build_warps; ++i) {
    const int own = token[i * build_warps];
    const bf16* row = from + static_cast<uint64>(static_cast<uint32>(max(own, 0))) * a.k;
    const uint32 at = (to ^ i % 2 << 6) + i * build_warps * row_bytes;
    copy16_async(at, row, own < 0 ? 0 : left);
    copy16_async(at + row_bytes / 2, row + slice_columns / 2, own < 0 ? 0 : right);
  }
  copy_commit();
}
static_assert(build_warps == 4, "a thread's rows are four apart: every other one swaps bit 6");

__device__ __forceinline__ void clear(Shared& shared, Turn turn) {
  uint4* values = reinterpret_cast<uint4*>(shared.values[turn.of3]);
  constexpr int words = sizeof(shared.values[0]) / sizeof(uint4);
#pragma unroll
  for (int i = 0; i < words; i += build_threads) values[i + builder()] = make_uint4(0, 0, 0, 0);
  if (builder() < piece_rows) shared.token[turn.of3][builder()] = -1;
}

// What a thread adds to a piece: one member's values. The tokens that are left to do are in `mask`.
__device__ __forceinline__ Member load_member(const Arguments& a, const Piece& piece, int batch) {
  const int at = piece.from + batch * build_threads + builder();
  return at < piece.to ? a.member[at] : Member{};
}

__device__ __forceinline__ bool any(const uint32 (&mask)[2]) { return (mask[0] | mask[1]) != 0; }

// Removes the first token.
__device__ __forceinline__ int take_first(uint32 (&mask)[2]) {
  const bool upper = mask[0] == 0;
  const uint32 bits = upper ? mask[1] : mask[0], rest = bits & (bits - 1);
  mask[0] = upper ? 0 : rest;
  mask[1] = upper ? rest : mask[1];
  return (upper ? 31 : -1) + __ffs(bits);
}

constexpr int burst = 8;  // values of a member that are on their way at once

// For the first and the second matrix, or the factors of one.
struct Values {
  bf16 first[burst], second[burst];
};

__device__ __forceinline__ void load_values(const Member& member, const bf16* first,
                                            const bf16* second, Values& values) {
  const uint64 base = static_cast<uint64>(member.column) * block_tokens;
  uint32 left[2] = {member.mask[0], member.mask[1]};
#pragma unroll
  for (int i = 0; i < burst; ++i) {
    if (!__any_sync(~0u, any(left))) break;
    if (!any(left)) continue;
    const uint64 at = base + place_of(take_first(left));
    values.first[i] = first[at];
    if (second != nullptr) values.second[i] = second[at];
  }
}

__device__ __forceinline__ void store_values(Shared& shared, Turn turn, int first_row, bool twice,
                                             bool product, Member& member, const Values& values) {
  const uint32 neuron = member.where % group_neurons, swizzle = neuron % 8 << 4;
  unsigned char* line = shared.values[turn.of3] + neuron * value_bytes;
  const int base = (member.where >> 5) * block_tokens;
#pragma unroll
  for (int i = 0; i < burst; ++i) {
    if (!__any_sync(~0u, any(member.mask))) break;
    if (!any(member.mask)) continue;
    const int token = take_first(member.mask);
    const uint32 all = token < 32 ? member.all[0] : member.all[1];
    const int row = (token < 32 ? member.row[0] : member.row[1]) - first_row +
                    __popc(all & ((1u << token % 32) - 1));
    if (static_cast<uint32>(row) >= piece_rows) continue;  // of the piece before or after
    bf16 first = values.first[i];
    if (product)
      first = static_cast<bf16>(pack_bf16(bf16_low(first) * bf16_low(values.second[i]), 0.0f));
    *reinterpret_cast<bf16*>(line + (row * 2 ^ swizzle)) = first;
    if (twice)
      *reinterpret_cast<bf16*>(line + group_neurons * value_bytes + (row * 2 ^ swizzle)) =
          values.second[i];
    shared.token[turn.of3][row] = base + token;
  }
}

// One piece's matrix of values, in four phases with a barrier between them; what one phase loads,
// the next one stores.
struct Builder {
  Shared& shared;
  const Arguments& a;
  Turn turn;
  Piece piece;
  const bf16 *first, *second;
  bool twice, product;
  int neuron;
  Member member;
  Values values;

  __device__ void begin(Turn of) {
    turn = of;
    piece = shared.piece[turn.of4];
    twice = a.twice(piece.slice);
    product = a.gated && !a.of_x(piece.slice);
    first = !a.gated ? (a.of_x(piece.slice) ? a.d_up : a.up) : twice ? a.d_gate : a.gate;
    second = !a.gated ? nullptr : twice ? a.d_up : a.up;
    const int place = piece.group * group_neurons + builder();
    neuron = piece.valid && builder() < group_neurons && place < a.n
                 ? static_cast<int>(a.order[place])
                 : -1;
    member = load_member(a, piece, 0);
    clear(shared, turn);
  }
  __device__ void load() { load_values(member, first, second, values); }
  __device__ void store() {
    store_values(shared, turn, piece.first_row, twice, product, member, values);
  }
  __device__ void middle() {
    if (builder() < group_neurons) shared.neuron[turn.of3][builder()] = neuron;
    store();
    load();
  }
  __device__ void end() {
    store();
    // What was too much for the phases: members with more than 16 tokens, more than 128 members.
    for (int batch = 0;;) {
      while (__any_sync(~0u, any(member.mask))) {
        load();
        store();
      }
      if (piece.from + ++batch * build_threads >= piece.to) break;
      member = load_member(a, piece, batch);
    }
  }
};

__device__ void build(Shared& shared, const Arguments& a) {
  const bool walks = builder() == 0;
  Builder next{shared, a};
  Walk walk{a};
  if (walks) {
    walk.start();
    for (int i = 0; i < 3; ++i) {
      shared.piece[i] = walk.piece();
      walk.advance();
    }
  }
  __syncthreads();
  Turn turn;
  for (int i = 0; i < 2; ++i) {
    next.begin(turn.ahead(i));
    __syncthreads();
    next.load();
    next.middle();
    next.end();
    __syncthreads();
  }
  int stage = 0;  // of the step that is fetched
  for (; stage < lookahead; ++stage)
    copy_step(shared, a, turn.ahead(stage / piece_steps), stage % piece_steps, stage);

  for (bool more = true; more; turn = turn.ahead(1)) {
#pragma unroll
    for (int step = 0; step < piece_steps; ++step) {
      copy_wait<lookahead - 1>();
      // This step's rows are here, and whatever the step before read may be overwritten.
      __syncthreads();
      if (step == 0 && !shared.piece[turn.of4].valid) {
        more = false;
        break;
      }
      const int fetched = step + lookahead;
      copy_step(shared, a, turn.ahead(fetched / piece_steps), fetched % piece_steps, stage);
      stage = stage + 1 == stages ? 0 : stage + 1;
      if (step == 0) next.begin(turn.ahead(2));
      if (step == 1) next.load();
      if (step == 2) next.middle();
      if (step == 3) {
        next.end();
        if (walks) {
          shared.piece[turn.ahead(3).of4] = walk.piece();
          walk.advance();
        }
      }
    }
  }
  copy_wait<0>();
}

// --- multiplying ---------------------------------------------------------------------------------

// Sums of a warp: [16 neurons][8 columns][element of the fragment], of one matrix or of two.
template <bool twice>
struct Sums {
  static constexpr int tiles = twice ? 4 : 2;
  float d[tiles][8][4] = {};
};

template <bool twice>
__device__ __forceinline__ void multiply_step(const Shared& shared, Turn turn, int step, int stage,
                                              Sums<twice>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 from_rows = smem_address(shared.rows[stage]) + lane % 16 * row_bytes;
  const uint32 from_values = smem_address(shared.values[turn.of3]) + lane % 16 * value_bytes +
                             (((step * 2 + lane / 16) ^ lane % 8) << 4);
  uint32 b[4][4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    load_matrices_transposed(
        b[pair], from_rows + (((warp * 8 + pair * 2 + lane / 16) ^ lane % 8) << 4));
#pragma unroll
  for (int i = 0; i < sums.tiles; ++i) {
    uint32 values[4];
    load_matrices(values, from_values + i * 16 * value_bytes);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      mma(sums.d[i][pair * 2], values, b[pair][0], b[pair][1]);
      mma(sums.d[i][pair * 2 + 1], values, b[pair][2], b[pair][3]);
    }
  }
}

// Where a thread keeps its sums of one part; the next 16 bytes lie a block of threads further.
__device__ __forceinline__ float4* sums_of(const Arguments& a, int slot, int slice) {
  constexpr uint64 one = group_neurons * slice_columns;
  const uint64 of_x = a.gated ? 2 * one : one, of_slot = a.slices * (of_x + one);
  const uint64 of_slice = slice * of_x - (a.of_x(slice) ? 0 : (slice - a.slices) * (of_x - one));
  return reinterpret_cast<float4*>(a.sums + slot * of_slot + of_slice) + threadIdx.x;
}

// Leaves a part's sums in memory. True where all parts are there: then `sums` are those of all.
template <bool twice>
__device__ __forceinline__ bool add_parts(Shared& shared, const Arguments& a, const Piece& piece,
                                          Sums<twice>& sums) {
  float4* own = sums_of(a, piece.slot, piece.slice);
#pragma unroll
  for (int i = 0; i < sums.tiles; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float(&d)[4] = sums.d[i][j];
      __stcg(own + (i * 8 + j) * multiply_threads, make_float4(d[0], d[1], d[2], d[3]));
    }
  __threadfence();
  named_barrier(1, multiply_threads);
  const int first = piece.slot - piece.part;
  uint32* done = a.progress + arrived + first * 2 * a.slices + piece.slice;
  if (threadIdx.x == 0) shared.add_up = atomicAdd(done, 1) == piece.parts - 1;
  named_barrier(1, multiply_threads);
  if (!shared.add_up) return false;
  __threadfence();
  sums = {};
  for (int part = 0; part < piece.parts; ++part) {
    const float4* from = sums_of(a, first + part, piece.slice);
#pragma unroll
    for (int i = 0; i < sums.tiles; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 more = __ldcg(from + (i * 8 + j) * multiply_threads);
        sums.d[i][j][0] += more.x;
        sums.d[i][j][1] += more.y;
        sums.d[i][j][2] += more.z;
        sums.d[i][j][3] += more.w;
      }
  }
  return true;
}

// At most 64 columns of one neuron's gradient, of which a lane has two of every eight; `half` says
// which elements of the fragments.
template <typename Out>
__device__ __forceinline__ void store_row(Out* row, int columns, const float (&d)[8][4], int half);

template <>
__device__ __forceinline__ void store_row(float* row, int columns, const float (&d)[8][4],
                                          int half) {
  row += threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (j * 8 < columns)
      *reinterpret_cast<float2*>(row + j * 8) = make_float2(d[j][2 * half], d[j][2 * half + 1]);
}

template <>
__device__ __forceinline__ void store_row(bf16* row, int columns, const float (&d)[8][4],
                                          int half) {
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
    uint32 word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      word[j] = pack_bf16(d[first + j][2 * half], d[first + j][2 * half + 1]);
    transpose_quad(word);  // 8 columns a lane: 16-byte stores
    const int octet = first * 8 + threadIdx.x % 4 * 8;
    if (octet < columns)
      *reinterpret_cast<uint4*>(row + octet) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

template <bool twice, typename Out>
__device__ __forceinline__ void store(const Shared& shared, const Arguments& a, Turn turn,
                                      int slice, const Sums<twice>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = a.first_column(slice) + warp * 64;
  Out* const up_or_down = static_cast<Out*>(a.of_x(slice) ? a.out_up : a.out_down) + column;
  Out* const gate = static_cast<Out*>(a.out_gate) + column;
#pragma unroll
  for (int i = 0; i < sums.tiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int neuron = shared.neuron[turn.of3][i % 2 * 16 + half * 8 + lane / 4];
      Out* const out = twice && i < 2 ? gate : up_or_down;
      store_row(out + static_cast<uint64>(max(neuron, 0)) * a.k, neuron < 0 ? 0 : a.k - column,
                sums.d[i], half);
    }
}

// The pieces of one unit.
template <bool twice>
__device__ __forceinline__ void multiply_unit(Shared& shared, const Arguments& a, Turn& turn,
                                              int& stage) {
  const int slice = shared.piece[turn.of4].slice;
  const bool inside = a.first_column(slice) + static_cast<int>(threadIdx.x) / 32 * 64 < a.k;
  Sums<twice> sums;
  while (true) {
    const int rows = inside ? shared.piece[turn.of4].rows : 0;
#pragma unroll 1
    for (int step = 0; step < piece_steps; ++step) {
      if (step > 0) __syncthreads();
      if (step * step_rows < rows) multiply_step(shared, turn, step, stage, sums);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    if (shared.piece[turn.of4].last) break;
    turn = turn.ahead(1);
    __syncthreads();
  }
  const Piece& piece = shared.piece[turn.of4];
  if (piece.parts == 1 || add_parts(shared, a, piece, sums)) {
    if (a.as_float)
      store<twice, float>(shared, a, turn, slice, sums);
    else
      store<twice, bf16>(shared, a, turn, slice, sums);
  }
  turn = turn.ahead(1);
}

__device__ __forceinline__ void multiply(Shared& shared, const Arguments& a) {
  // As many barriers as `build` has before its loop.
  for (int i = 0; i < 5; ++i) __syncthreads();
  Turn turn;
  int stage = 0;
  while (true) {
    __syncthreads();
    const Piece& piece = shared.piece[turn.of4];
    if (!piece.valid) return;
    if (a.twice(piece.slice))
      multiply_unit<true>(shared, a, turn, stage);
    else
      multiply_unit<false>(shared, a, turn, stage);
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    weight_grad(const bf16* x_MK, const bf16* dy_MK, const bf16* d_gate, const bf16* d_up,
                const bf16* gate, const bf16* up, int k, int n, const uint32* order,
                const Member* member, const uint2* piece, const Unit* unit, const uint32* control,
                uint32* progress, float* sums, int gated, int as_float, void* gate_NK, void* up_NK,
                void* down_NK) {
  extern __shared__ __align__(128) unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  await_previous_kernel();
  const int slices = (k + slice_columns - 1) / slice_columns;
  const Arguments a{k,    n,             slices,  gated != 0, x_MK, dy_MK,   d_gate,   d_up,
                    gate, up,            order,   member,     piece, unit,   control,  progress,
                    sums, as_float != 0, gate_NK, up_NK,      down_NK};
  if (threadIdx.x < multiply_threads)
    multiply(shared, a);
  else
    build(shared, a);
}

extern "C" __device__ const uint32 weight_grad_shared_bytes = sizeof(Shared);
