// The backend WARPIPE: NIXL's calls, each one a few lines over `Owner`, `Peer` and `Transfer`.

#ifndef WARPIPE_NIXL_ENGINE_HPP
#define WARPIPE_NIXL_ENGINE_HPP

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "backend/backend_engine.h"
#include "gpu.hpp"
#include "owner.hpp"
#include "peer.hpp"

namespace warpipe_nixl {

class Engine : public nixlBackendEngine {
public:
  explicit Engine(const nixlBackendInitParams *init);

  bool supportsRemote() const override { return true; }
  bool supportsLocal() const override { return true; }
  bool supportsNotif() const override { return true; }
  nixl_mem_list_t getSupportedMems() const override { return {DRAM_SEG, VRAM_SEG}; }

  nixl_status_t registerMem(const nixlBlobDesc &memory, const nixl_mem_t &kind,
                            nixlBackendMD *&out) override;
  nixl_status_t deregisterMem(nixlBackendMD *metadata) override;
  nixl_status_t loadLocalMD(nixlBackendMD *input, nixlBackendMD *&output) override;
  nixl_status_t getPublicData(const nixlBackendMD *metadata, std::string &data) const override;
  nixl_status_t getConnInfo(std::string &info) const override;

  nixl_status_t loadRemoteConnInfo(const std::string &agent, const std::string &info) override;
  nixl_status_t loadRemoteMD(const nixlBlobDesc &input, const nixl_mem_t &kind,
                             const std::string &agent, nixlBackendMD *&output) override;
  nixl_status_t unloadMD(nixlBackendMD *metadata) override;
  nixl_status_t connect(const std::string &agent) override;
  nixl_status_t disconnect(const std::string &agent) override;

  nixl_status_t prepXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                         const nixl_meta_dlist_t &remote, const std::string &agent,
                         nixlBackendReqH *&handle,
                         const nixl_opt_b_args_t *options = nullptr) const override;
  nixl_status_t postXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                         const nixl_meta_dlist_t &remote, const std::string &agent,
                         nixlBackendReqH *&handle,
                         const nixl_opt_b_args_t *options = nullptr) const override;
  nixl_status_t checkXfer(nixlBackendReqH *handle) const override;
  nixl_status_t releaseReqH(nixlBackendReqH *handle) const override;

  nixl_status_t getNotifs(notif_list_t &notifications) override;
  nixl_status_t genNotif(const std::string &agent, const std::string &message) const override;

private:
  std::shared_ptr<Peer> peer(const std::string &agent) const;
  std::shared_ptr<Gpu> gpu(std::uint64_t ordinal) const;
  std::unique_ptr<GpuTransfer> gpu_transfer(nixl_xfer_op_t op, const nixl_meta_dlist_t &local,
                                            const nixl_meta_dlist_t &remote,
                                            std::shared_ptr<Peer> peer) const;
  void copy_here(nixl_xfer_op_t op, const nixl_meta_dlist_t &local,
                 const nixl_meta_dlist_t &remote) const;

  std::string service_;
  std::shared_ptr<Host> host_;
  std::unique_ptr<Owner> owner_;
  mutable std::mutex peers_mutex_;
  // By their agents' names.
  std::map<std::string, std::shared_ptr<Peer>> peers_;
  mutable std::mutex gpus_mutex_;
  mutable std::map<std::uint64_t, std::shared_ptr<Gpu>> gpus_;
};

} // namespace warpipe_nixl

#endif
