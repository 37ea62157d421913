// weight_grad: the weights' gradients of a sparse FFN, from columns in the order of group_columns and
// their values in the form of fill_pieces.
//
//   gate[n] = Σ d_gate · x[token]    up[n] = Σ d_up · x[token]    down[n] = Σ gate · up · dy[token]
//
// A work unit is 32 neurons × 512 columns of x or dy × some pieces of 64 rows. Four warps copy, each
// one 16 rows of every piece with their values into a stage of its own; eight warps multiply, each of
// them 64 columns. Nothing but the stages' barriers keeps them together, and pieces follow each other
// without a gap, whatever unit they belong to. Slices of 512 columns are worked off one after the
// other: all tokens' slice fits into L2, and x as a whole does not (64 MB at 16384 × 2048).
//
// On real traces (16384 tokens, 16–44 fired neurons each) a group's rows are 0.46–0.63 of its
// (token, neuron) pairs; of groups of 16, 0.56–0.74; of 64, 0.33–0.50 at twice the products.
//
// A group of neurons that is split leaves its parts' sums in memory; who comes last adds them up,
// in their order: the same bits every time.
#include "weight_sums.cuh"

namespace {
// Rows are 16 bytes apart in their banks: those of one column, of eight rows, meet no conflict.
constexpr int row_bytes = slice_columns * 2, row_stride = row_bytes + 16;
static_assert(copy_warps == piece_steps, "a copying warp has the same step of every piece");

// A block fits wherever 99 KB can be had (sm_86, 89, 120).
constexpr int stages = __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 ? 11
                       : __CUDA_ARCH__ == 800                        ? 8
                                                                     : 5;
static_assert(stages > copy_warps, "a warp's next stage is at most one turn further");

// What is to be done with the pieces of a unit.
struct alignas(16) Work {
  int group, rows;        // rows of the group
  int piece, pieces;      // first and number
  int first_row;          // of the first piece, in the group
  int slot, part, parts;  // of its sums
  int slice;              // -1: there is no more work
};

// Units that are made known: two ahead of the piece whose tokens the first copying warp looks up,
// which is two ahead of the piece that it copies, which is `stages` steps ahead of the slowest warp
// at most. Nobody needs a place any more when it is written again.
constexpr int places = 16, pieces_ahead = 2;
static_assert(2 + pieces_ahead + stages / piece_steps + 2 < places, "");

struct Stage {
  unsigned char rows[step_rows * row_stride];
  unsigned char values[2 * matrix_bytes];
};

struct alignas(128) Shared {
  Stage stage[stages];
  Work work[places];
  uint64 known[places];
  uint64 full[stages], empty[stages];
  bool add_up;
};

// A position in a ring, and the parity of its turn.
template <int size>
struct Turn {
  int at = 0;
  uint32 parity = 0;
  __device__ __forceinline__ void advance(int steps) {
    at += steps;
    if (at >= size) {
      at -= size;
      parity ^= 1;
    }
  }
};

// --- the order of work ---------------------------------------------------------------------------

// One thread takes units and makes them known; its loads run a unit or two ahead.
struct Walk {
  Shared& shared;
  const Arguments& a;
  int units, total;
  int place = 0, later;
  Work next;

  __device__ int take() { return gridDim.x + atomicAdd(a.progress + next_unit, 1); }
  __device__ Work fetch(int index) const {
    Work work{};
    work.slice = -1;
    if (index < total) {
      const Unit unit = a.unit[index % units];
      const int piece = a.piece_first[index % units];
      work = Work{unit.group, unit.rows, piece,      unit.pieces,  unit.first_row,
                  unit.slot,  unit.part, unit.parts, index / units};
    }
    return work;
  }
  __device__ void publish(const Work& work) {
    shared.work[place] = work;
    barrier_arrive(shared.known + place);
    place = (place + 1) % places;
  }
  __device__ void start() {
    units = a.control[total_units];
    total = units * 2 * a.slices;
    const int second = take(), third = take();
    later = take();
    publish(fetch(blockIdx.x));
    publish(fetch(second));
    next = fetch(third);
  }
  // Once for every unit that is begun.
  __device__ void advance() {
    publish(next);
    next = fetch(later);
    later = take();
  }
};

// --- copying -------------------------------------------------------------------------------------

__device__ __forceinline__ int copy_warp() { return threadIdx.x / 32 - multiply_warps; }

// A warp's 16 rows of a piece.
struct Step {
  int slice;  // -1: there is no more work
  int piece;
  bool rows;  // there are any
  int token;  // of row lane % 16
};

// Looks up the tokens of one piece after the other.
struct Tokens {
  Shared& shared;
  const Arguments& a;
  Walk walk;
  Turn<places> turn;
  Work unit{};
  int done = 0;

  __device__ void open() {
    const bool walks = copy_warp() == 0 && threadIdx.x % 32 == 0;
    barrier_wait(shared.known + turn.at, turn.parity);
    unit = shared.work[turn.at];
    turn.advance(1);
    done = 0;
    if (walks && unit.slice >= 0) walk.advance();
  }
  __device__ Step next() {
    if (unit.slice >= 0 && done == unit.pieces) open();
    if (unit.slice < 0) return {-1, 0, false, 0};
    const int lane = threadIdx.x % 32, first = copy_warp() * step_rows;
    Step step{unit.slice, unit.piece + done,
              unit.first_row + done * piece_rows + first < unit.rows, 0};
    if (step.rows)
      step.token = a.piece_token[static_cast<uint64>(step.piece) * piece_rows + first +
                                 lane % step_rows];
    ++done;
    return step;
  }
};

__device__ __forceinline__ void copy_step(Stage& stage, const Arguments& a, const Step& step) {
  const int lane = threadIdx.x % 32, column = a.first_column(step.slice) + lane * 8;
  const uint32 left = column < a.k ? 16 : 0, right = column + slice_columns / 2 < a.k ? 16 : 0;
  const bf16* from = (a.of_x(step.slice) ? a.x : a.dy) + column;
  const uint32 to = smem_address(stage.rows) + lane * 16;

  const int matrices = a.gated ? 3 : 2, skipped = a.of_x(step.slice) ? 0 : matrices - 1;
  const char* values =
      reinterpret_cast<const char*>(a.piece_values) +
      ((static_cast<uint64>(step.piece) * piece_steps + copy_warp()) * matrices + skipped) *
          matrix_bytes +
      lane * 16;
  const uint32 to_values = smem_address(stage.values) + lane * 16;
  copy16_async(to_values, values, 16);
  copy16_async(to_values + 512, values + 512, 16);
  if (a.twice(step.slice)) {
    copy16_async(to_values + 1024, values + 1024, 16);
    copy16_async(to_values + 1536, values + 1536, 16);
  }
#pragma unroll
  for (int i = 0; i < step_rows; ++i) {
    const uint32 token = __shfl_sync(~0u, step.token, i);
    const bf16* row = from + static_cast<uint64>(token) * static_cast<uint32>(a.k);
    copy16_async(to + i * row_stride, row, left);
    copy16_async(to + i * row_stride + row_bytes / 2, row + slice_columns / 2, right);
  }
}
static_assert(matrix_bytes == 1024, "two copies a lane");

__device__ void copy(Shared& shared, const Arguments& a) {
  Tokens tokens{shared, a, Walk{shared, a}};
  if (copy_warp() == 0 && threadIdx.x % 32 == 0) tokens.walk.start();
  __syncwarp();
  tokens.open();
  Step now = tokens.next(), next = tokens.next();
  Turn<stages> turn;
  turn.advance(copy_warp());
  while (now.slice >= 0) {
    const Step later = tokens.next();
    __syncwarp();
    barrier_wait(shared.empty + turn.at, turn.parity ^ 1);
    if (now.rows) copy_step(shared.stage[turn.at], a, now);
    copy_arrive(shared.full + turn.at);
    turn.advance(copy_warps);
    now = next;
    next = later;
  }
}

// --- multiplying ---------------------------------------------------------------------------------

template <bool twice>
__device__ __forceinline__ void multiply_step(const Stage& stage, Sums<twice>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 from_rows =
      smem_address(stage.rows) + lane % 16 * row_stride + warp * 128 + lane / 16 * 16;
  const uint32 from_values = smem_address(stage.values) + value_at(lane % 16, lane / 16 * 8) * 2;
  uint32 b[4][4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) load_matrices_transposed(b[pair], from_rows + pair * 32);
#pragma unroll
  for (int i = 0; i < sums.tiles; ++i) {
    uint32 values[4];
    load_matrices(values, from_values + i * 16 * step_rows * 2);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      mma(sums.d[i][pair * 2], values, b[pair][0], b[pair][1]);
      mma(sums.d[i][pair * 2 + 1], values, b[pair][2], b[pair][3]);
    }
  }
}

template <bool twice>
__device__ __forceinline__ void multiply_unit(Shared& shared, const Arguments& a, const Work& unit,
                                              Turn<stages>& turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int place = unit.group * group_neurons + lane;
  const int own = place < a.n ? static_cast<int>(a.order[place]) : -1;
  const bool inside = a.first_column(unit.slice) + warp * 64 < a.k;
  Sums<twice> sums;
  int rows = inside ? unit.rows - unit.first_row : 0;
#pragma unroll 1
  for (int step = unit.pieces * piece_steps; step > 0; --step, rows -= step_rows) {
    barrier_wait(shared.full + turn.at, turn.parity);
    if (rows > 0) multiply_step(shared.stage[turn.at], sums);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty + turn.at);
    turn.advance(1);
  }
  if (unit.parts == 1 ||
      add_parts(shared.add_up, a, unit.slice, unit.slot, unit.part, unit.parts, sums))
    store(a, unit.slice, own, sums);
}

__device__ __forceinline__ void multiply(Shared& shared, const Arguments& a) {
  Turn<stages> turn;
  Turn<places> at;
  while (true) {
    barrier_wait(shared.known + at.at, at.parity);
    const Work& unit = shared.work[at.at];
    at.advance(1);
    if (unit.slice < 0) return;
    if (a.twice(unit.slice))
      multiply_unit<true>(shared, a, unit, turn);
    else
      multiply_unit<false>(shared, a, unit, turn);
  }
}

__device__ __forceinline__ void run(Shared& shared, const Arguments& a) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < places; ++i) barrier_init(shared.known + i, 1);
    for (int i = 0; i < stages; ++i) {
      barrier_init(shared.full + i, 32);
      barrier_init(shared.empty + i, multiply_warps);
    }
  }
  __syncthreads();
  if (threadIdx.x < multiply_threads)
    multiply(shared, a);
  else
    copy(shared, a);
}
}  // namespace

extern "C" __global__ void __launch_bounds__(block_threads, 1)
    weight_grad(const bf16* x_MK, const bf16* dy_MK, int k, int n, const uint32* order,
                const Unit* unit, const uint32* control, const int* piece_first,
                const int* piece_token, const bf16* piece_values, uint32* progress, float* sums,
                int gated, int as_float, void* gate_NK, void* up_NK, void* down_NK) {
  extern __shared__ __align__(128) unsigned char raw[];
  await_previous_kernel();
  const int slices = (k + slice_columns - 1) / slice_columns;
  const Arguments a{k,    n,           slices,      gated != 0,   x_MK,     dy_MK, order,
                    unit, control,     piece_first, piece_token,  piece_values, progress,
                    sums, as_float != 0, gate_NK,   up_NK,        down_NK};
  run(*reinterpret_cast<Shared*>(raw), a);
}

extern "C" __device__ const uint32 weight_grad_shared_bytes = sizeof(Shared);
