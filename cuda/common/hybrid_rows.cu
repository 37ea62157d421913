// hybrid_rows: TwELL → the hybrid format (common/hybrid.cuh), and the statistics of its pattern. One
// block of threads per token block; the last of them lists the rows of the backup.
//
// `active_N` and `active_bits`, a bit for each neuron that is active in a token block, lack the rows of the
// backup, which dense_rows adds; all counts are integers, so that their order does not matter.
#include "common/block_sums.cuh"
#include "common/hybrid.cuh"

namespace {
constexpr int threads = 256, warps = threads / 32;

struct Shared {
  uint32 nonzeros[block_tokens];  // of each row; plus `not_held` for each tile that overflowed
  uint32 sum[warps];
  bool last;
};

struct Twell {
  const uint32* word;
  int tiles;
};

// Copies a row's non-zeros, one warp, and counts them by neuron in bytes of `active`.
__device__ __forceinline__ void copy_row(const uint32* from, const Twell& twell, uint32* to,
                                         uint32* active) {
  const int lane = threadIdx.x % 32;
  uint32 before = 0;
  for (int first = 0; first < twell.tiles; first += 32) {
    const uint32* words = from + static_cast<uint64>(first + lane) * twell_width;
    uint4 head = make_uint4(0, 0, 0, 0);
    if (first + lane < twell.tiles) head = *reinterpret_cast<const uint4*>(words);
    const uint32 through = sum_to_lane(head.x);
    uint32* out = to + before + through - head.x;
    for (uint32 i = 0; i < head.x; ++i) {
      const uint32 word = i == 0 ? head.y : i == 1 ? head.z : i == 2 ? head.w : words[i + 1];
      const uint32 neuron = word_neuron(word);
      out[i] = word;
      atomicAdd(active + neuron / 4, 1u << neuron % 4 * 8);
    }
    before += __shfl_sync(~0u, through, 31);
  }
}

// The heavy rows, from their bits, and how many do not fit into the backup.
__device__ __forceinline__ void list_rows(Shared& shared, const uint32* heavy, int words,
                                          uint32 backup, uint32* list, uint32* control) {
  uint32 before = 0;
  for (int base = 0; base < words; base += threads) {
    const int own = base + threadIdx.x;
    uint32 bits = own < words ? __ldcg(heavy + own) : 0;
    const Sums sums = sum_threads(shared.sum, __popc(bits));
    uint32* to = list + before + sums.before;
    for (; bits != 0; bits &= bits - 1) *to++ = own * 32 + __ffs(bits) - 1;
    before += sums.total;
  }
  if (threadIdx.x != 0) return;
  control[num_overflowed] = before;
  control[num_recomputed] = before - min(before, backup);  // its high half is zero
}
}  // namespace

extern "C" __global__ void __launch_bounds__(threads)
    hybrid_rows(const uint32* twell_word, int m, int n, const int* token, int width, int backup,
                uint32* word, uint32* count, uint32* heavy, uint32* list, uint32* control,
                int* nnz_M, uint32* active_N, uint32* active_bits, uint64* union_sum,
                unsigned char* table) {
  extern __shared__ __align__(16) unsigned char raw[];  // a byte for each neuron
  __shared__ Shared shared;
  uint32* active = reinterpret_cast<uint32*>(raw);
  await_previous_kernel();
  const int block = blockIdx.x, first = block * block_tokens, rows = min(block_tokens, m - first);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const Twell twell{twell_word, (n + tile_neurons - 1) / tile_neurons};
  const uint64 row_words = static_cast<uint64>(twell.tiles) * twell_width;
  for (int i = thread; i < (n + 3) / 4; i += threads) active[i] = 0;
  if (thread < block_tokens) shared.nonzeros[thread] = 0;
  __syncthreads();
  for (int item = thread; item < rows * twell.tiles; item += threads) {
    const int row = item / twell.tiles, tile = item % twell.tiles;
    const uint32 own = twell.word[(first + row) * row_words + tile * twell_width];
    if (own > 0) atomicAdd(shared.nonzeros + row, own + (own < twell_width ? 0 : not_held));
  }
  __syncthreads();
  for (int row = warp; row < rows; row += warps)
    if (shared.nonzeros[row] <= width)
      copy_row(twell.word + (first + row) * row_words, twell,
               word + static_cast<uint64>(first + row) * width, active);
  if (thread < block_tokens) {
    const bool there = thread < rows;
    const uint32 own = there ? shared.nonzeros[thread] : 0;
    const bool in_backup = own > width;
    const uint32 bits = __ballot_sync(~0u, in_backup);
    if (lane == 0) heavy[block * 2 + warp] = bits;
    if (there) {
      count[first + thread] = in_backup ? 0 : own;
      nnz_M[token == nullptr ? first + thread : token[first + thread]] = own % not_held;
    }
  }
  __syncthreads();
  uint32 members = 0;
  for (int start = warp * 32; start < n; start += threads) {
    const int neuron = start + lane;
    const uint32 own = neuron < n ? raw[neuron] : 0;
    if (neuron < n) table[static_cast<uint64>(block) * n + neuron] = own;
    if (own != 0) atomicAdd(active_N + neuron, own);
    const uint32 bits = __ballot_sync(~0u, own != 0);
    if (lane == 0) active_bits[static_cast<uint64>(block) * ((n + 31) / 32) + start / 32] = bits;
    members += __popc(bits);
  }
  if (lane == 0 && members != 0) atomicAdd(union_sum, static_cast<uint64>(members));

  if (!is_last_block(shared.last, control + num_finished)) return;
  list_rows(shared, heavy, gridDim.x * 2, backup, list, control);
}

extern "C" __device__ const uint32 exported_shared_bytes = max_neurons;
