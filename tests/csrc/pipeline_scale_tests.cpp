// SPDX-License-Identifier: Apache-2.0
//
// What the pipeline costs beside reading, updating and writing must grow like the number of chunks.
// Counted in processor time of this program, which a busy machine hardly changes.
#include <cstdio>
#include <ctime>
#include <thread>

#include "harness.h"
#include "pipeline_fixture.h"

using namespace fixture;

namespace {

constexpr std::uint64_t kNumel = 16;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kFew = 500;  // for what sanitizers look at; what it costs is told without
#else
constexpr std::size_t kFew = 2000;
#endif
constexpr std::size_t kMany = 10 * kFew;
// For ten times the chunks: caches take their part of it. What is quadratic took 70.
constexpr double kMostTimes = 30.0;

double cpu_secs()
{
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Tiny chunks that all use the same few pages of one file, or of memory: nobody looks at values.
class Crowd {
  public:
    Crowd(std::size_t num_chunks, Place state)
        : size(num_chunks),
          file(Access::kBuffered, 6 * kPageBytes),
          engine(options(IoBackend::kThreads)),
          staging(256 * 3 * kPageBytes),
          block(3 * kPageBytes),
          values(2 * kNumel),
          pipeline(&engine, &staging, 1)
    {
        ChunkSpec spec;
        spec.whole = spec.in_memory = spec.stored = whole_layout(kNumel);
        spec.param_type = spec.grad_type = ElementType::kFloat32;
        spec.num_slots = 2;
        if (state == Place::kStorage) {
            spec.state_slots[0] = {{file.fd(), 0, 3 * kPageBytes}};
            spec.state_slots[1] = {{file.fd(), 3 * kPageBytes, 3 * kPageBytes}};
        } else {
            spec.resident_state = block.data();
        }
        char* memory = reinterpret_cast<char*>(values.data());
        spec.param_memory = {memory, memory};
        for (std::size_t i = 0; i < size; ++i) {
            spec.position = static_cast<std::int64_t>(i);
            pipeline.add_chunk(spec);
        }
    }
    ~Crowd()
    {
        pipeline.stop();
        engine.close();
    }

    void enqueue_all(std::int64_t generation)
    {
        for (std::size_t i = size; i-- > 0;) {
            ChunkUpdate update;
            update.chunk = i;
            update.generation = generation;
            update.segments = {{0, kNumel, rule}};
            update.gradient = reinterpret_cast<const char*>(values.data() + kNumel);
            update.gradient_type = ElementType::kFloat32;
            pipeline.enqueue(std::move(update));
        }
    }
    // As backward ends: everything that can be done before the step has been done.
    void wait_updated(std::uint64_t num_updates)
    {
        while (pipeline.stats().num_updates < num_updates)
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        while (engine.num_in_flight() > 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    void finish(std::int64_t generation)
    {
        pipeline.publish(generation);
        for (std::size_t i = 0; i < size; ++i) {
            CHECK(pipeline.wait_published(i, generation, kPatienceSecs));
            CHECK(pipeline.wait_gradient_read(i, generation, kPatienceSecs));
        }
        CHECK(pipeline.wait_durable(generation, kPatienceSecs));
        pipeline.set_committed(generation);
    }

    const std::size_t size;
    TempFile file;
    IoEngine engine;
    AlignedPool staging;
    std::vector<char> block;
    std::vector<float> values;
    ChunkPipeline pipeline;
    const std::shared_ptr<const UpdateRule> rule = std::make_shared<CountingRule>();
};

// Processor time of two steps: one whose speculated updates are published, one that redoes all.
double cost_of_two_steps(std::size_t num_chunks, Place state)
{
    Crowd crowd(num_chunks, state);
    const double begin = cpu_secs();
    crowd.enqueue_all(1);
    crowd.wait_updated(num_chunks);
    crowd.finish(1);
    crowd.enqueue_all(2);
    crowd.wait_updated(2 * num_chunks);
    for (std::size_t i = 0; i < num_chunks; ++i) crowd.pipeline.invalidate(i);
    crowd.enqueue_all(2);
    crowd.finish(2);
    return cpu_secs() - begin;
}

// What others do on the machine costs caches, and turns of the scheduler: it may do so once or
// twice.
void check_growth(Place state)
{
    double few = 0.0, many = 0.0;
    for (int trial = 0; trial == 0 || (trial < 4 && many >= kMostTimes * few); ++trial) {
        few = (cost_of_two_steps(kFew, state) + cost_of_two_steps(kFew, state)) / 2;
        many = cost_of_two_steps(kMany, state);
        std::printf(
            "  %.1f us of processor time a chunk and step, %.1f with ten times the chunks\n",
            few / 2 / kFew * 1e6, many / 2 / kMany * 1e6);
    }
    CHECK(many < kMostTimes * few);
}

}  // namespace

TEST(pipeline_cost_a_chunk_does_not_grow_with_storage)
{
    check_growth(Place::kStorage);
}

TEST(pipeline_cost_a_chunk_does_not_grow_in_memory)
{
    check_growth(Place::kDram);
}
