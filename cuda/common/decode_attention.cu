// decode_attention: one new token of each of M sequences attends to the keys and values of the sequence.
//
// It also rotates queries and keys (RoPE, after an RMSNorm of each head where the model has one), and
// writes the new key and value to the cache: it takes q, k and v as decode_linear leaves them. It rounds
// where transformers' Llama does.
//
// Bound by reading the cache. A block computes one head of one token on a part of the positions (a
// split); of a row of the cache a lane has 16 bytes, so that a warp reads several rows at once. Each
// group of lanes that share a row has its own running maximum and sum; they are merged in a fixed order.
// The last split of a head to finish merges all of them.
#include "common/element.cuh"

namespace {
constexpr int num_warps = 4, num_threads = 32 * num_warps;
constexpr int vector = 8;  // elements in 16 bytes
constexpr int unroll = 4;  // rows that a lane reads ahead
constexpr int max_head_size = 32 * vector;
constexpr float lowest = -1e30f;  // less than any score: its exponential is 0

struct Head {
  const element* qkv;            // of the token
  element *keys, *values;        // of the sequence and head: [capacity][head_size]
  const element *cos, *sin;      // of the token's position; null: no rotation
  const element *q_norm, *k_norm;  // weights, or null
  float epsilon, scale;          // times log2(e)
  uint32 head, kv_head, heads, kv_heads, size;
  uint32 begin, end, slot;       // the split's positions; where the new token's lie
  bool has_new, writes_new;
};

struct Vector {
  float value[vector];

  __device__ __forceinline__ static Vector from(uint4 words) {
    return {{element_low(words.x), element_high(words.x), element_low(words.y), element_high(words.y),
             element_low(words.z), element_high(words.z), element_low(words.w), element_high(words.w)}};
  }
  __device__ __forceinline__ static Vector load(const element* at) {
    return from(*reinterpret_cast<const uint4*>(at));
  }
  __device__ __forceinline__ uint4 packed() const {
    return make_uint4(pack_elements(value[0], value[1]), pack_elements(value[2], value[3]),
                      pack_elements(value[4], value[5]), pack_elements(value[6], value[7]));
  }
  __device__ __forceinline__ void round() { *this = from(packed()); }
  __device__ __forceinline__ float dot(const Vector& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < vector; ++i) sum = fmaf(value[i], other.value[i], sum);
    return sum;
  }
};

// The sum over the `lanes` neighbouring lanes that share a row.
template <int lanes>
__device__ __forceinline__ float add_lanes(float sum) {
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// A head's query or key, normalised and rotated. Every group of `lanes` lanes computes all of it.
template <int lanes>
__device__ __forceinline__ Vector prepared(const Head& h, const element* from, const element* norm) {
  const uint32 lane = threadIdx.x % lanes;
  Vector own = Vector::load(from + lane * vector);
  if (norm != nullptr) {
    const float squares = add_lanes<lanes>(own.dot(own));
    const float times = rsqrtf(squares / static_cast<float>(lanes * vector) + h.epsilon);
    const Vector weight = Vector::load(norm + lane * vector);
#pragma unroll
    for (int i = 0; i < vector; ++i) own.value[i] *= times;
    own.round();
#pragma unroll
    for (int i = 0; i < vector; ++i) own.value[i] *= weight.value[i];
    own.round();
  }
  if (h.cos == nullptr) return own;
  Vector straight, turned;
  const Vector cos = Vector::load(h.cos + lane * vector), sin = Vector::load(h.sin + lane * vector);
  const bool lower = lane < lanes / 2;
#pragma unroll
  for (int i = 0; i < vector; ++i) {
    const float other = __shfl_xor_sync(~0u, own.value[i], lanes / 2);  // half a head away
    straight.value[i] = own.value[i] * cos.value[i];
    turned.value[i] = (lower ? -other : other) * sin.value[i];
  }
  straight.round();
  turned.round();
#pragma unroll
  for (int i = 0; i < vector; ++i) straight.value[i] += turned.value[i];
  straight.round();
  return straight;
}

// A softmax over some positions: its maximum, the sum of its exponentials, and their sum of values.
struct Softmax {
  float largest = lowest, sum = 0.0f;
  Vector value = {};

  // Merges with the same of another lane; both lanes get the same result.
  __device__ __forceinline__ void merge_lane(int other) {
    const float theirs = __shfl_xor_sync(~0u, largest, other), both = fmaxf(largest, theirs);
    const float own_share = exp2f(largest - both), share = exp2f(theirs - both);
    sum = sum * own_share + __shfl_xor_sync(~0u, sum, other) * share;
#pragma unroll
    for (int i = 0; i < vector; ++i)
      value.value[i] =
          value.value[i] * own_share + __shfl_xor_sync(~0u, value.value[i], other) * share;
    largest = both;
  }
};

// What is merged across warps and splits: the maximum, the sum, then `size` values.
struct Part {
  const float* memory;
  uint32 stride, num;
  __device__ __forceinline__ float merged(uint32 column, float& sum, float& largest) const {
    largest = lowest;
    for (uint32 i = 0; i < num; ++i) largest = fmaxf(largest, memory[i * stride]);
    float value = 0.0f;
    sum = 0.0f;
    for (uint32 i = 0; i < num; ++i) {
      const float share = exp2f(memory[i * stride] - largest);
      sum += share * memory[i * stride + 1];
      value += share * memory[i * stride + 2 + column];
    }
    return value;
  }
};

// This block's part of the head's softmax; each warp leaves its own in shared memory.
template <int lanes>
__device__ __forceinline__ void attend(const Head& h, float (&parts)[num_warps][2 + max_head_size]) {
  constexpr int rows = 32 / lanes, step = num_warps * rows;
  const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
  Vector q = prepared<lanes>(h, h.qkv + h.head * h.size, h.q_norm);
#pragma unroll
  for (int i = 0; i < vector; ++i) q.value[i] *= h.scale;
  Softmax own;
  if (h.has_new && warp == 0) {  // the whole warp: its lanes exchange values
    const element* from = h.qkv + h.heads * h.size;
    const Vector k = prepared<lanes>(h, from + h.kv_head * h.size, h.k_norm);
    const Vector v = Vector::load(from + (h.kv_heads + h.kv_head) * h.size + lane * vector);
    const float score = add_lanes<lanes>(q.dot(k));
    if (group == 0) {
      own.largest = score;
      own.sum = 1.0f;
      own.value = v;
      if (h.writes_new) {
        const uint64 to = static_cast<uint64>(h.slot) * h.size + lane * vector;
        *reinterpret_cast<uint4*>(h.keys + to) = k.packed();
        *reinterpret_cast<uint4*>(h.values + to) = v.packed();
      }
    }
  }
#pragma unroll 1
  for (uint32 first = h.begin; first < h.end; first += step * unroll) {
    uint4 k[unroll], v[unroll];
    float score[unroll];
#pragma unroll
    for (int i = 0; i < unroll; ++i) {
      const uint32 row = first + i * step + group;
      k[i] = v[i] = make_uint4(0, 0, 0, 0);
      if (row < h.end) {
        const uint64 at = static_cast<uint64>(row) * h.size + lane * vector;
        k[i] = *reinterpret_cast<const uint4*>(h.keys + at);
        v[i] = *reinterpret_cast<const uint4*>(h.values + at);
      }
    }
    float largest = own.largest;
#pragma unroll
    for (int i = 0; i < unroll; ++i) {
      score[i] = add_lanes<lanes>(q.dot(Vector::from(k[i])));
      if (first + i * step + group >= h.end) score[i] = 2.0f * lowest;
      largest = fmaxf(largest, score[i]);
    }
    const float share = exp2f(own.largest - largest);
    own.largest = largest;
    own.sum *= share;
#pragma unroll
    for (int i = 0; i < vector; ++i) own.value.value[i] *= share;
#pragma unroll
    for (int i = 0; i < unroll; ++i) {
      const float weight = exp2f(score[i] - largest);
      const Vector value = Vector::from(v[i]);
      own.sum += weight;
#pragma unroll
      for (int j = 0; j < vector; ++j)
        own.value.value[j] = fmaf(weight, value.value[j], own.value.value[j]);
    }
  }
#pragma unroll
  for (int other = lanes; other < 32; other *= 2) own.merge_lane(other);
  if (threadIdx.x % 32 < lanes) {
    float* to = parts[warp];
    if (lane == 0) {
      to[0] = own.largest;
      to[1] = own.sum;
    }
#pragma unroll
    for (int i = 0; i < vector; ++i) to[2 + lane * vector + i] = own.value.value[i];
  }
}

// Begins to bring a split's keys and values to L2, up to a limit: earlier kernels have written them.
__device__ __forceinline__ void prefetch(const Head& h) {
  constexpr uint32 line = 64, most = 16 * 1024;  // elements
  const uint64 start = static_cast<uint64>(h.begin) * h.size;
  const uint32 num = min((h.end - h.begin) * h.size, most);
  for (uint32 at = threadIdx.x * line; at < num; at += num_threads * line) {
    prefetch_to_l2(h.keys + start + at);
    prefetch_to_l2(h.values + start + at);
  }
}
}  // namespace

// The cache is [M][kv_heads][capacity][head_size]; `slot_1` is where the new token's keys and values go.
// A token attends to positions from `first_M` to the slot, and to the last `window` of them (0: all).
// `partial` is [M][heads][splits][2 + head_size], `finished` is [M][heads], of zeros, which it leaves so.
extern "C" __global__ void __launch_bounds__(num_threads)
    decode_attention(const element* qkv_MN, element* keys, element* values, const element* cos_PD,
                     const element* sin_PD, const int* position_M, const int* first_M,
                     const int* slot_1, const element* q_norm_D, const element* k_norm_D,
                     float epsilon, float scale, uint32 heads, uint32 kv_heads, uint32 head_size,
                     uint32 capacity, uint32 window, uint32 splits, float* partial,
                     uint32* finished, element* y_MN) {
  __shared__ float parts[num_warps][2 + max_head_size];
  __shared__ bool last;
  admit_next_kernel();
  const uint32 split = blockIdx.x % splits, row = blockIdx.x / splits;  // of [M][heads]
  const uint32 token = row / heads, head = row % heads, kv_head = head / (heads / kv_heads);
  // The three are of the step, and other kernels have ended since they were written.
  const uint32 slot = slot_1[0], position = position_M[token];
  uint32 begin = first_M[token];
  if (window != 0 && slot + 1 > begin + window) begin = slot + 1 - window;
  const uint32 each = (slot - begin + splits - 1) / splits;
  const uint64 sequence = (static_cast<uint64>(token) * kv_heads + kv_head) * capacity * head_size;
  const bool rotates = cos_PD != nullptr;
  const uint64 angle = static_cast<uint64>(position) * head_size;
  const Head h{qkv_MN + static_cast<uint64>(token) * (heads + 2 * kv_heads) * head_size,
               keys + sequence, values + sequence,
               rotates ? cos_PD + angle : nullptr, rotates ? sin_PD + angle : nullptr,
               q_norm_D, k_norm_D, epsilon, scale, head, kv_head, heads, kv_heads, head_size,
               min(begin + split * each, slot), min(begin + (split + 1) * each, slot), slot,
               split == splits - 1, split == splits - 1 && head % (heads / kv_heads) == 0};
  prefetch(h);
  await_previous_kernel();
  if (head_size == 64)
    attend<8>(h, parts);
  else if (head_size == 128)
    attend<16>(h, parts);
  else if (head_size == 256)
    attend<32>(h, parts);
  else if (head_size == 32)
    attend<4>(h, parts);
  else
    attend<2>(h, parts);
  __syncthreads();
  element* y = y_MN + static_cast<uint64>(row) * head_size;
  const Part warps{&parts[0][0], 2 + max_head_size, num_warps};
  float* own = partial + (static_cast<uint64>(row) * splits + split) * (2 + head_size);
  for (uint32 column = threadIdx.x; column < head_size; column += num_threads) {
    float sum, largest;
    const float value = warps.merged(column, sum, largest);
    if (splits == 1) {
      y[column] = static_cast<element>(pack_elements(value / sum, 0.0f));
    } else {
      if (column == 0) {
        own[0] = largest;
        own[1] = sum;
      }
      own[2 + column] = value;
    }
  }
  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(finished + row, 1) == splits - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const Part all{partial + static_cast<uint64>(row) * splits * (2 + head_size), 2 + head_size, splits};
  for (uint32 column = threadIdx.x; column < head_size; column += num_threads) {
    float sum, largest;
    const float value = all.merged(column, sum, largest);
    y[column] = static_cast<element>(pack_elements(value / sum, 0.0f));
  }
  if (threadIdx.x == 0) finished[row] = 0;
}
