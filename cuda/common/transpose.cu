// transpose: a matrix (rows, columns) → (columns, rows), elements or fp32; or fp32 rounded to
// elements. Both sizes are multiples of 8, both matrices contiguous and aligned to 16 bytes. PyTorch's
// strided copy takes 72 µs for a W_down, five times what moving its bytes takes (H200, 2048 × 5632, bf16).
// mirror_strip: the same within symmetric matrices, from right of the diagonal to below it.
//
// A block of threads transposes a tile of 64 rows × 128 bytes of the result's type. A lane reads and
// writes 16 bytes of memory at a time; a warp transposes 32 rows × 16 bytes of the tile at a time.
#include "common/mma.cuh"
#include "common/tiles.cuh"

namespace {
using namespace transpose_tiles;
constexpr int warps = threads / 32;
constexpr int turned_rows = 32, turns = tile_rows / turned_rows * row_chunks;
constexpr int loads = tile_rows * row_chunks / threads;
static_assert(loads * threads == tile_rows * row_chunks);
static_assert(turns % warps == 0 && tile_rows % turned_rows == 0);
static_assert(turned_rows == 32, "ldmatrix takes a row of each lane");

template <class To>
constexpr int chunk_values = 16 / sizeof(To);

// Where a chunk lies in the tile: swapped, so that what `turn` reads at once is in different banks.
template <class To>
__device__ __forceinline__ int place_of(int row, int chunk) {
  const int swap = sizeof(To) == 2 ? row % 2 | row / 8 % 4 << 1 : row / 4 % 8;
  return row * row_chunks + (chunk ^ swap);
}

template <class Both>
__device__ __forceinline__ uint4 load_chunk(const Both* from, Both) {
  return *reinterpret_cast<const uint4*>(from);
}
__device__ __forceinline__ uint4 load_chunk(const float* from, element) {
  const float4 a = reinterpret_cast<const float4*>(from)[0];
  const float4 b = reinterpret_cast<const float4*>(from)[1];
  return make_uint4(pack_elements(a.x, a.y), pack_elements(a.z, a.w), pack_elements(b.x, b.y),
                    pack_elements(b.z, b.w));
}

// Where a lane's part of 32 rows × one chunk goes: a row of the result, of as many as the chunk has
// values, and 16 bytes of its 32 columns.
template <class To>
__device__ __forceinline__ int lane_row() {
  return threadIdx.x % 32 / (turned_rows / chunk_values<To>);
}
template <class To>
__device__ __forceinline__ int lane_column() {
  return threadIdx.x % (turned_rows / chunk_values<To>) * chunk_values<To>;
}

// Of matrix j, ldmatrix gives lane l row 2(l % 4) and the next. These are rows 8(l % 4) + 2j and the
// next of the tile, so that a lane has eight rows in order.
__device__ __forceinline__ uint4 turn(const uint4* tile, int first_row, int chunk, element) {
  const int lane = threadIdx.x % 32;
  const int row = first_row + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
  uint32 word[4];
  load_matrices_transposed(word, smem_address(tile + place_of<element>(row, chunk)));
  return make_uint4(word[0], word[1], word[2], word[3]);
}
__device__ __forceinline__ uint4 turn(const uint4* tile, int first_row, int chunk, float) {
  const uint32* words = reinterpret_cast<const uint32*>(tile);
  uint32 word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + lane_column<float>() + i;
    word[i] = words[place_of<float>(row, chunk) * 4 + lane_row<float>()];
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Tile `index` of (rows, columns), which lie in a matrix with rows of `from_length` numbers, as their
// transpose does in one with rows of `to_length`.
template <class From, class To>
__device__ __forceinline__ void transpose_tile(uint4* tile, uint32 index, const From* from,
                                               int from_length, To* to, int to_length, int rows,
                                               int columns) {
  constexpr int values = chunk_values<To>, tile_columns = row_chunks * values;
  const int across = (columns + tile_columns - 1) / tile_columns;
  const int first_row = index / across * tile_rows;
  const int first_column = index % across * tile_columns;
  const int warp = threadIdx.x / 32;
  uint4 chunk[loads];
#pragma unroll
  for (int i = 0; i < loads; ++i) {
    const int row = first_row + (i * threads + threadIdx.x) / row_chunks;
    const int column = first_column + threadIdx.x % row_chunks * values;
    chunk[i] = make_uint4(0, 0, 0, 0);
    if (row < rows && column < columns)
      chunk[i] = load_chunk(from + static_cast<uint64>(row) * from_length + column, To{});
  }
#pragma unroll
  for (int i = 0; i < loads; ++i)
    tile[place_of<To>((i * threads + threadIdx.x) / row_chunks, threadIdx.x % row_chunks)] =
        chunk[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < turns / warps; ++i) {
    const int number = warp * (turns / warps) + i;
    const int half = number % (tile_rows / turned_rows) * turned_rows;
    const int source = number / (tile_rows / turned_rows);
    const uint4 turned = turn(tile, half, source, To{});
    const int row = first_column + source * values + lane_row<To>();
    const int column = first_row + half + lane_column<To>();
    if (row < columns && column < rows)
      *reinterpret_cast<uint4*>(to + static_cast<uint64>(row) * to_length + column) = turned;
  }
}
}  // namespace

// From fp32 or elements, to fp32 or elements; not from elements to fp32.
extern "C" __global__ void __launch_bounds__(threads, 12)
    transpose(const void* matrix, void* out, int rows, int columns, int from_float, int to_float) {
  __shared__ __align__(128) uint4 tile[tile_rows * row_chunks];
  await_previous_kernel();
  const uint32 index = blockIdx.x;
  if (to_float)
    transpose_tile(tile, index, static_cast<const float*>(matrix), columns,
                   static_cast<float*>(out), rows, rows, columns);
  else if (from_float)
    transpose_tile(tile, index, static_cast<const float*>(matrix), columns,
                   static_cast<element*>(out), rows, rows, columns);
  else
    transpose_tile(tile, index, static_cast<const element*>(matrix), columns,
                   static_cast<element*>(out), rows, rows, columns);
}

// Of each of several matrices (size, size): rows start to end, right of column end → their transpose.
extern "C" __global__ void __launch_bounds__(threads, 12)
    mirror_strip(element* matrices, int size, int start, int end, uint32 tiles_of_matrix) {
  __shared__ __align__(128) uint4 tile[tile_rows * row_chunks];
  await_previous_kernel();
  const uint64 matrix = blockIdx.x / tiles_of_matrix;
  element* first = matrices + matrix * size * size;
  const element* from = first + static_cast<uint64>(start) * size + end;
  element* to = first + static_cast<uint64>(end) * size + start;
  transpose_tile(tile, blockIdx.x % tiles_of_matrix, from, size, to, size, end - start, size - end);
}

extern "C" __device__ const uint32 exported_rows = tile_rows, exported_row_bytes = row_chunks * 16;
